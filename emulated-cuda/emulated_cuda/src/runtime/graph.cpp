#include "runtime/graph.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <set>

#include "runtime/stream.h"

namespace emulated {

namespace {

struct Executable {
    std::shared_ptr<std::vector<std::shared_ptr<Node>>> nodes;  // what is queued holds them, too
};

std::set<Graph*>& graphs() {
    static auto* all = new std::set<Graph*>;
    return *all;
}

Graph* graph_of(cudaGraph_t handle) {
    auto* graph = reinterpret_cast<Graph*>(handle);
    return graphs().count(graph) ? graph : nullptr;
}

// All nodes once. With a seed the order is drawn among those that nothing holds back, so that a dependency that the
// capture did not see shows.
void run(const std::vector<std::shared_ptr<Node>>& nodes) {
    if (!options().reordered) {
        for (auto& node : nodes) node->run();
        return;
    }
    std::vector<bool> done(nodes.size());
    for (size_t left = nodes.size(); left; --left) {
        std::vector<size_t> ready;
        for (size_t index = 0; index < nodes.size(); ++index) {
            auto& depends = nodes[index]->depends;
            if (!done[index] && std::all_of(depends.begin(), depends.end(), [&](int each) { return done[each]; })) {
                ready.push_back(index);
            }
        }
        size_t chosen = ready[draw(static_cast<unsigned>(ready.size()))];
        nodes[chosen]->run();
        done[chosen] = true;
    }
}

}  // namespace

Graph* new_graph() { return *graphs().insert(new Graph).first; }

void delete_graph(Graph* graph) {
    graphs().erase(graph);
    delete graph;
}

}  // namespace emulated

using namespace emulated;

extern "C" {

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t handle, unsigned long long) {
    Lock lock;
    Graph* graph = graph_of(handle);
    if (!graph) return report(cudaErrorInvalidValue);
    auto nodes = std::make_shared<std::vector<std::shared_ptr<Node>>>(graph->nodes);
    *executable = reinterpret_cast<cudaGraphExec_t>(new Executable{nodes});
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t on) {
    Lock lock;
    Stream* stream = find(on);
    if (!stream) return report(cudaErrorInvalidResourceHandle);
    auto nodes = reinterpret_cast<Executable*>(handle)->nodes;
    return enqueue(*stream, "graph", [nodes] { run(*nodes); });
}

cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
    Lock lock;
    Graph* graph = graph_of(handle);
    if (!graph) return report(cudaErrorInvalidValue);
    delete_graph(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
    Lock lock;
    delete reinterpret_cast<Executable*>(handle);
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t* nodes, size_t* count) {
    Lock lock;
    Graph* graph = graph_of(handle);
    if (!graph) return report(cudaErrorInvalidValue);
    if (nodes) {
        for (size_t index = 0; index < std::min(*count, graph->nodes.size()); ++index) {
            nodes[index] = reinterpret_cast<cudaGraphNode_t>(graph->nodes[index].get());
        }
    }
    *count = graph->nodes.size();
    return cudaSuccess;
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t handle, cudaGraphNode_t* nodes, cudaGraphEdgeData*,
                                         size_t* count) {
    Lock lock;
    if (nodes) return refuse("cudaGraphNodeGetDependencies, other than for the number");
    *count = reinterpret_cast<Node*>(handle)->depends.size();
    return cudaSuccess;
}

cudaError_t cudaGraphDebugDotPrint(cudaGraph_t handle, const char* path, unsigned) {
    Lock lock;
    Graph* graph = graph_of(handle);
    if (!graph) return report(cudaErrorInvalidValue);
    std::FILE* file = std::fopen(path, "w");
    if (!file) return report(cudaErrorOperatingSystem);
    std::fprintf(file, "digraph dot {\n");
    for (auto& node : graph->nodes) {
        std::fprintf(file, "n%d [label=\"%s\"];\n", node->index, node->kind.c_str());
        for (int each : node->depends) std::fprintf(file, "n%d -> n%d;\n", each, node->index);
    }
    std::fprintf(file, "}\n");
    std::fclose(file);
    return cudaSuccess;
}

}  // extern "C"
