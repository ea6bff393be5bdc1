// The API of graphs, and their replays.
#include <utility>

#include "runtime/capture.h"
#include "runtime/memory.h"
#include "runtime/races.h"
#include "runtime/trace.h"

DOCUMENTED(
    "runtime: docs/zh/api_ref/15_model_running_instance__management.md"
    "; runtime: docs/zh/api_ref/25-01_aclError.md");

namespace emulator {

namespace {

struct GraphTask : Task {
    GraphTask(std::shared_ptr<Graph> graph, uint32_t call) : state(std::move(graph)) { state.call = call; }
    Replay state;
    TracePoint begin;
    bool ready(const Context&) override { return !state.graph->running || state.graph->running == this; }
    Replay* replay(const Context& context) override {
        if (!state.graph->running) {
            state.graph->running = this;
            begin_in_order(context.stream, *this);
            fork_lanes(context, state);
            begin = std::chrono::steady_clock::now();
            for (auto& task : state.graph->defaults) task->run(context);
        }
        return &state;
    }
    void finish(const Context& context) override {
        if (state.graph->running == this) {
            state.graph->running = nullptr;
            trace_event(TraceKind::graph, name(), context, 0, begin, state.call);
        }
        join_lanes(state);
        if (state.failure && !context.stream.failure) context.stream.failure = state.failure;
    }
    std::string name() const override { return format("Graph%u", state.graph->id); }
};

}  // namespace

std::shared_ptr<Graph> find_graph(aclmdlRI handle) {
    auto graph = machine().graphs.find(handle);
    if (!graph) fail(ACL_ERROR_RT_INVALID_HANDLE, format("%p is not a live graph", handle));
    return graph;
}

Graph::~Graph() {
    Device& owner = device_of(device);  // its counters are atomic, because the last owner may not hold the lock
    owner.streams -= static_cast<int64_t>(lanes.size());
    owner.tasks -= tasks;
    for (void* word : conditions) release(word);
}

std::shared_ptr<Graph> new_graph(int device) {
    static uint32_t ids = 0;
    auto graph = std::make_shared<Graph>();
    graph->id = ++ids;
    graph->device = device;
    return graph;
}

void forget(Graph& graph) {
    for (auto& branch : graph.branches) forget(*branch);
    forget_conditions(graph);
    for (auto& group : graph.groups) machine().groups.remove(group.get());
    machine().graphs.remove(&graph);
}

Replay::Replay(std::shared_ptr<Graph> graph, Replay* parent) : graph(std::move(graph)), parent(parent) { restart(); }

void Replay::restart() {
    join_lanes(*this);
    lanes.clear();
    lanes.resize(graph->lanes.size());
    signalled.assign(graph->edges.size(), false);
}

bool Replay::over() const {
    for (size_t i = 0; i < lanes.size(); ++i) {
        if (lanes[i].next < graph->lanes[i].tasks.size()) return false;
    }
    return true;
}

}  // namespace emulator

using namespace emulator;

extern "C" {

aclError aclmdlRIExecuteAsync(aclmdlRI handle, aclrtStream stream_handle) {
    std::shared_ptr<Graph> graph;
    uint32_t call = call_stack();
    Lock lock(machine().mutex);
    graph = find_graph(handle);
    if (!graph) return ACL_ERROR_RT_INVALID_HANDLE;
    auto stream = find_stream(stream_handle);
    if (!stream) return no_such_stream(stream_handle);
    if (graph->capturing)
        return fail(ACL_ERROR_RT_MODEL_CAPTURED, format("graph %u must not be in a capture", graph->id));
    if (stream->capture) {
        return fail(ACL_ERROR_RT_STREAM_CAPTURED,
                    format("graph %u must not be replayed on the captured stream %d", graph->id, stream->id));
    }
    if (graph->device != stream->device) {
        return fail(ACL_ERROR_RT_MODEL_CONTEXT,
                    format("graph %u and stream %d must be on the same device, but are on %d and %d", graph->id,
                           stream->id, graph->device, stream->device));
    }
    return submit(*stream, std::make_shared<GraphTask>(graph, call));
}

// Running replays finish, because they own the graph too.
aclError aclmdlRIDestroy(aclmdlRI handle) {
    std::shared_ptr<Graph> graph;
    Lock lock(machine().mutex);
    graph = find_graph(handle);
    if (!graph) return ACL_ERROR_RT_INVALID_HANDLE;
    if (graph->capturing)
        return fail(ACL_ERROR_RT_MODEL_CAPTURED, format("graph %u must not be in a capture", graph->id));
    forget(*graph);
    lock.unlock();
    return ACL_SUCCESS;
}

aclError aclmdlRIGetId(aclmdlRI handle, uint32_t* id) {
    Lock lock(machine().mutex);
    auto graph = find_graph(handle);
    if (!graph) return ACL_ERROR_RT_INVALID_HANDLE;
    *id = graph->id;
    return ACL_SUCCESS;
}

}  // extern "C"
