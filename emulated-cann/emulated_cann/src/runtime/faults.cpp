// Injected faults: counts calls, and makes the selected ones fail.
#include "runtime/faults.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>

#include "runtime/control.h"

namespace emulator {

namespace {

struct Armed {
    Fault kind;
    std::string name;
    int64_t first, count;
    Injection injection;
    int64_t seen = 0, struck = 0;
};
struct Faults {
    std::atomic<int> armed{0};  // avoids the lock while there are no faults
    std::mutex mutex;
    std::condition_variable changed;
    std::map<int, Armed> all;
    int numbers = 0;
};
Faults& faults() {
    static auto* only = new Faults;
    return *only;
}

const std::map<std::string, Fault> fault_kinds = {
    {"malloc", Fault::malloc}, {"launch", Fault::launch}, {"execution", Fault::execution},
    {"hang", Fault::hang},     {"delay", Fault::delay},   {"stream", Fault::stream},
    {"copy", Fault::copy}};

}  // namespace

bool fault_at(Fault kind, const std::string& name, Injection* injection) {
    if (!faults().armed.load(std::memory_order_relaxed)) return false;
    std::lock_guard lock(faults().mutex);
    bool strikes = false;
    for (auto& [number, fault] : faults().all) {
        if (fault.kind != kind || (!fault.name.empty() && fault.name != name)) continue;
        ++fault.seen;
        bool within = fault.seen >= fault.first && (fault.count == 0 || fault.seen < fault.first + fault.count);
        if (!within || strikes) continue;
        strikes = true;
        ++fault.struck;
        if (injection) *injection = fault.injection;
    }
    return strikes;
}

void wait_out(const Injection& injection) {
    std::unique_lock lock(faults().mutex);
    faults().changed.wait_for(lock, std::chrono::milliseconds(injection.milliseconds),
                              [&] { return !faults().all.count(injection.number); });
}

}  // namespace emulator

using namespace emulator;

extern "C" {

int emulated_cann_arm(const char* kind, const char* name, int64_t first, int64_t count, int code, int milliseconds) {
    auto known = fault_kinds.find(kind);
    if (known == fault_kinds.end()) return -1;
    std::lock_guard lock(faults().mutex);
    int number = ++faults().numbers;
    faults().all.emplace(number, Armed{known->second, name, first, count, {code, milliseconds, number}});
    ++faults().armed;
    return number;
}

int64_t emulated_cann_disarm(int number) {
    std::lock_guard lock(faults().mutex);
    auto found = faults().all.find(number);
    if (found == faults().all.end()) return -1;
    int64_t struck = found->second.struck;
    faults().all.erase(found);
    --faults().armed;
    faults().changed.notify_all();
    return struck;
}

}  // extern "C"
