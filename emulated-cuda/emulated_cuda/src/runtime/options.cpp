#include "runtime/options.h"

#include <cstdio>
#include <cstdlib>

namespace emulated {

namespace {

long number(const char* name, long otherwise, long least, long most) {
    const char* text = std::getenv(name);
    if (!text || !*text) return otherwise;
    char* end = nullptr;
    long value = std::strtol(text, &end, 10);
    if (!*end && value >= least && value <= most) return value;
    std::fprintf(stderr, "emulated CUDA: %s is '%s', and must be a number from %ld to %ld\n", name, text, least, most);
    std::exit(2);
}

Options read() {
    Options found;
    found.devices = static_cast<int>(number("EMULATED_CUDA_DEVICES", 1, 0, max_devices));
    found.memory = static_cast<size_t>(number("EMULATED_CUDA_MEMORY", 8 << 10, 1, 1 << 20)) << 20;
    if (const char* capability = std::getenv("EMULATED_CUDA_CAPABILITY")) {
        if (std::sscanf(capability, "%d.%d", &found.major, &found.minor) != 2) {
            std::fprintf(stderr, "emulated CUDA: EMULATED_CUDA_CAPABILITY is '%s', and must be as 9.0\n", capability);
            std::exit(2);
        }
    }
    found.reordered = std::getenv("EMULATED_CUDA_SEED") != nullptr;
    found.seed = static_cast<unsigned>(number("EMULATED_CUDA_SEED", 0, 0, 0x7FFFFFFF));
    return found;
}

}  // namespace

const Options& options() {
    static const Options only = read();
    return only;
}

unsigned draw(unsigned limit) {
    static std::mt19937 generator(options().seed);
    return static_cast<unsigned>(generator() % limit);
}

}  // namespace emulated
