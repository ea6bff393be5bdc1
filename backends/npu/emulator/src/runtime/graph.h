// Graphs (CANN: model run instances, aclmdlRI) and their replays. capture.h tells how they are made.
#pragma once

#include "runtime/stream.h"

namespace emulator {

// One lane per captured stream, in the order of capture; lane 0 is that of the stream where the capture began. Lanes
// are ordered only by edges: an event recorded in one and waited for in another.
struct Graph {
    struct Lane {
        std::vector<TaskPointer> tasks;
        size_t joined = 0;  // tasks of this lane that lane 0 waits for in the end
    };
    struct Edge {
        size_t lane, position;  // where it was recorded
    };
    uint32_t id = 0;
    int device = 0;
    std::vector<Lane> lanes;
    std::vector<Edge> edges;
    std::vector<std::shared_ptr<TaskGroup>> groups;
    std::vector<std::shared_ptr<Graph>> branches;  // of conditions
    std::vector<void*> conditions;                 // words of device memory
    std::vector<TaskPointer> defaults;             // what a replay runs first
    int64_t tasks = 0;
    bool capturing = false;
    const void* running = nullptr;  // the replay under way: one at a time
    ~Graph();
};

// Kernels that can be replaced while the graph stays.
struct TaskGroup {
    Graph* graph = nullptr;
    std::vector<TaskPointer> tasks;
};

// One execution of a graph: how far each lane is.
struct Replay {
    struct Lane {
        size_t next = 0;
        std::unique_ptr<Replay> child;  // of a condition that is this lane's next task
    };
    explicit Replay(std::shared_ptr<Graph> graph, Replay* parent = nullptr);
    void restart();
    bool over() const;
    Replay& root() { return parent ? parent->root() : *this; }

    std::shared_ptr<Graph> graph;
    Replay* parent;
    std::vector<Lane> lanes;
    std::vector<char> signalled;  // by edge
    Failure failure;              // of the root: what is left is skipped
};

std::shared_ptr<Graph> new_graph(int device);
// The graph of a handle; null, having failed, for a stale one. With the lock held, as for all that follows.
std::shared_ptr<Graph> find_graph(aclmdlRI handle);
// Takes the handles of a graph and of its task groups out of use.
void forget(Graph& graph);
// Takes the handles of its conditions out of use.
void forget_conditions(Graph& graph);

}  // namespace emulator
