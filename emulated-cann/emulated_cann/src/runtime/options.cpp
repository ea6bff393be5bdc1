// Initial options, from the environment variable EMULATED_CANN_OPTIONS: a JSON object of numbers, strings and booleans.
#include <cstdlib>
#include <regex>

#include "runtime/control.h"

namespace {

// activation.py writes and validates the object, so a regular expression suffices to parse it.
[[gnu::constructor]] void read_options() {
    const char* text = std::getenv("EMULATED_CANN_OPTIONS");
    if (!text) return;
    std::string options = text;
    const std::regex entry(R"re("(\w+)"\s*:\s*(?:"([^"]*)"|(-?\d+|true|false)))re");
    for (std::sregex_iterator found(options.begin(), options.end(), entry), end; found != end; ++found) {
        std::string name = (*found)[1], value = (*found)[2].matched ? (*found)[2] : (*found)[3];
        if (name == "seed") {
            emulated_cann_seed(1, std::strtoull(value.c_str(), nullptr, 10));
        } else if (name == "trace") {
            emulated_cann_trace_to(value.c_str());
        } else if (name == "races") {
            if (value == "true") emulated_cann_report_races();
        } else {
            emulated_cann_set(name.c_str(), value.c_str());
        }
    }
}

}  // namespace
