// The dump of a graph in the Chrome trace format, for chrome://tracing and torch_npu's alignment of dumps.
#include <unistd.h>

#include <fstream>

#include "runtime/graph.h"

DOCUMENTED("runtime: docs/zh/api_ref/15_model_running_instance__management.md");

namespace emulator {

namespace {

// Arbitrary durations, as in CANN's dumps, which describe the contents of a graph and not its timing.
struct Length {
    double shown, taken;
};
Length length(const std::string& type) {
    if (type == "EVENT_RECORD") return {4.5, 5};
    if (type == "EVENT_WAIT" || type == "MEM_WAIT_VALUE") return {14.5, 15};
    return {9.5, 10};
}

void write_lane(std::ofstream& file, const Graph& graph, size_t lane, const char*& separator) {
    double time = 0;
    int task = 0;
    for (auto& each : graph.lanes[lane].tasks) {
        for (auto& [name, type] : each->dumped()) {
            auto [shown, taken] = length(type);
            file << separator
                 << format(
                        "{\"name\": \"%s\", \"pid\": \"%d aclGraph\", \"tid\": \"stream%zu\", \"ts\": %g, "
                        "\"dur\": %g, \"ph\": \"X\", \"args\": {\"Model Id\": %u, \"Stream Id\": %zu, "
                        "\"Task Id\": %d, \"Task Type\": \"%s\"}}",
                        name.c_str(), static_cast<int>(getpid()), lane, time, shown, graph.id, lane, task++,
                        type.c_str());
            separator = ",\n";
            time += taken;
        }
    }
}

}  // namespace

}  // namespace emulator

using namespace emulator;

extern "C" {

// The flag for kernel arguments is ignored, because they are not emulated.
aclError aclmdlRIDebugJsonPrint(aclmdlRI handle, const char* path, uint32_t) {
    Lock lock(machine().mutex);
    auto graph = find_graph(handle);
    if (!graph) return ACL_ERROR_RT_INVALID_HANDLE;
    std::ofstream file(path);
    const char* separator = "";
    file << "[\n";
    for (size_t lane = 0; lane < graph->lanes.size(); ++lane) write_lane(file, *graph, lane, separator);
    file << "\n]\n";
    file.close();
    return file ? ACL_SUCCESS : fail(ACL_ERROR_RT_PARAM_INVALID, format("%s cannot be written", path));
}

}  // extern "C"
