// Options, the schedule seed and counts of live objects.
#include "runtime/control.h"

#include <cstdlib>
#include <cstring>

#include "runtime/memory.h"
#include "runtime/scheduler.h"

using namespace emulator;

namespace {

int64_t* number_option(const std::string& name) {
    Options& options = machine().options;
    const std::map<std::string, int64_t*> all = {{"devices", &options.devices},
                                                 {"memory", &options.memory},
                                                 {"streams", &options.streams},
                                                 {"tasks", &options.tasks},
                                                 {"stall", &options.stall}};
    auto found = all.find(name);
    return found == all.end() ? nullptr : found->second;
}

}  // namespace

extern "C" {

int emulated_cann_set(const char* name, const char* value) {
    Lock lock(machine().mutex);
    Options& options = machine().options;
    std::string key = name;
    if (key == "soc" || key == "version") {
        (key == "soc" ? options.soc : options.version) = value;
        return 0;
    }
    int64_t* option = number_option(key);
    char* end = nullptr;
    int64_t number = std::strtoll(value, &end, 10);
    if (!option || *end || end == value || number < 1) return -1;
    if (key == "memory" && number > static_cast<int64_t>(span / 2)) return -1;
    if (key == "devices" && (number > max_devices || !machine().devices.empty())) return -1;
    *option = number;
    return 0;
}

int64_t emulated_cann_get(const char* name) {
    Lock lock(machine().mutex);
    int64_t* option = number_option(name);
    return option ? *option : -1;
}

void emulated_cann_seed(int seeded, uint64_t seed) { set_seed(seeded != 0, seed); }

int64_t emulated_cann_live(const char* kind) {
    std::string name = kind;
    if (name == "allocation") return static_cast<int64_t>(live_allocations());
    if (name == "pinned") return static_cast<int64_t>(pinned_allocations());
    Lock lock(machine().mutex);
    Machine& all = machine();
    int64_t tasks = 0, streams = 0;
    for (auto& device : all.devices) {
        tasks += device.tasks;
        streams += device.streams;
    }
    if (name == "stream") return static_cast<int64_t>(all.streams.live.size());
    if (name == "captured") return streams - static_cast<int64_t>(all.streams.live.size());
    if (name == "event") return static_cast<int64_t>(all.events.live.size());
    if (name == "graph") return static_cast<int64_t>(all.graphs.live.size());
    if (name == "group") return static_cast<int64_t>(all.groups.live.size());
    if (name == "task") return tasks;
    return -1;
}

int64_t emulated_cann_memory(int device, int peak) {
    std::lock_guard lock(memory_mutex());
    return static_cast<int64_t>(peak ? accounts(device).peak : accounts(device).used);
}

}  // extern "C"
