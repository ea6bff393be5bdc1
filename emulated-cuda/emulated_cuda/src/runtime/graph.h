// Graphs: work with what it depends on, that is run again and again.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace emulated {

struct Node {
    int index;
    std::string kind;
    std::function<void()> run;
    std::vector<int> depends;
};

struct Graph {
    std::vector<std::shared_ptr<Node>> nodes;  // each behind those that it depends on
};

Graph* new_graph();
void delete_graph(Graph* graph);

}  // namespace emulated
