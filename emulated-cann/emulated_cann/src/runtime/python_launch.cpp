// Launches whose kernel is a function in Python; see python_launch.py.
#include <mutex>

#include "runtime/control.h"
#include "runtime/launch.h"

namespace emulator {

namespace {

struct Dropped {
    std::mutex mutex;
    std::vector<int64_t> numbers;
};
Dropped& dropped() {
    static auto* only = new Dropped;
    return *only;
}

}  // namespace

}  // namespace emulator

using namespace emulator;

extern "C" {

int emulated_cann_launch(void* stream, const char* kernel, const emulated_cann_operand* operands, int count,
                         int (*function)(int64_t), int64_t number) {
    Launch made{.kernel = kernel};
    for (int i = 0; i < count; ++i) {
        auto& each = operands[i];
        auto access = each.written ? Access::read_write : Access::read;
        made.operands.push_back({each.address, each.bytes, access, each.dtype, {each.shape, each.shape + each.dims}});
    }
    // Python forgets the function later: it takes Python's lock, for which nobody may wait with the machine's.
    std::shared_ptr<const int64_t> owned(new int64_t(number), [](const int64_t* last) {
        std::lock_guard lock(dropped().mutex);
        dropped().numbers.push_back(*last);
        delete last;
    });
    OURS("the function in Python raised it");
    made.run = [function, owned] {
        if (function(*owned)) throw std::runtime_error("its function in Python raised an exception");
    };
    return launch(stream, std::move(made));
}

int64_t emulated_cann_dropped() {
    std::lock_guard lock(dropped().mutex);
    if (dropped().numbers.empty()) return -1;
    int64_t number = dropped().numbers.back();
    dropped().numbers.pop_back();
    return number;
}

void* emulated_cann_backing(const void* address) { return backing(address); }

}  // extern "C"
