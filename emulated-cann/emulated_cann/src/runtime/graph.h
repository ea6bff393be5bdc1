// Graphs (CANN: model run instances, aclmdlRI) and their replays. See capture.h for their creation.
#pragma once

#include "runtime/stream.h"

namespace emulator {

// A graph has one lane per captured stream, in the order of capture. Lane 0 belongs to the stream on which the capture
// began. Only edges order lanes: an event recorded in one lane and waited for in another.
struct Graph {
    struct Lane {
        std::vector<TaskPointer> tasks;
        size_t joined = 0;      // tasks of this lane that lane 0 waits for, directly or not
        uint32_t timeline = 0;  // its number; 0 if there is none
    };
    struct Edge {
        size_t lane, position;  // of the recording
    };
    uint32_t id = 0;
    int device = 0;
    std::vector<Lane> lanes;
    std::vector<Edge> edges;
    std::vector<std::shared_ptr<TaskGroup>> groups;
    std::vector<std::shared_ptr<Graph>> branches;  // of conditional tasks
    std::vector<void*> conditions;                 // words of device memory
    std::vector<TaskPointer> defaults;             // tasks that a replay runs first
    int64_t tasks = 0;
    bool capturing = false;
    const void* running = nullptr;  // the running replay; there is at most one
    ~Graph();
};

// Kernels in a graph that an update can replace.
struct TaskGroup {
    Graph* graph = nullptr;
    std::vector<TaskPointer> tasks;
};

// One execution of a graph, with the progress of each lane.
struct Replay {
    struct Lane {
        size_t next = 0;
        std::unique_ptr<Replay> child;  // of a conditional task that is this lane's next task
        std::shared_ptr<Timeline> timeline;
    };
    explicit Replay(std::shared_ptr<Graph> graph, Replay* parent = nullptr);
    void restart();
    bool over() const;
    Replay& root() { return parent ? parent->root() : *this; }

    std::shared_ptr<Graph> graph;
    Replay* parent;
    std::vector<Lane> lanes;
    std::vector<char> signalled;  // by edge
    std::vector<Times> released;  // by edge, if races are looked for
    uint32_t call = 0;            // of the root replay, see call_stack
    Failure failure;              // in the root replay: remaining tasks are skipped
};

std::shared_ptr<Graph> new_graph(int device);
// Returns the graph of a handle, or fails and returns null for a stale one. Requires the lock, as do the functions
// below.
std::shared_ptr<Graph> find_graph(aclmdlRI handle);
// Invalidates the handles of a graph and of its task groups.
void forget(Graph& graph);
// Invalidates the handles of the graph's conditions.
void forget_conditions(Graph& graph);

}  // namespace emulator
