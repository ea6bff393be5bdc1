// Conditional nodes of graphs: branches and loops on a word of device memory, read when the replay reaches the node.
#include "runtime/capture.h"
#include "runtime/memory.h"

DOCUMENTED(
    "runtime: docs/zh/api_ref/15_model_running_instance__management.md"
    "; runtime: docs/zh/api_ref/25-01_aclError.md");

namespace emulator {

namespace {

struct Condition {
    void* word;  // device memory that the graph owns
    std::weak_ptr<Graph> graph;
};
std::map<void*, Condition>& conditions() {  // by handle, which is the word's address; guarded by the machine's lock
    static auto* all = new std::map<void*, Condition>;
    return *all;
}

struct DefaultTask : Task {
    DefaultTask(void* word, uint64_t value) : word(word), value(value) {}
    void* word;
    uint64_t value;
    void run(const Context&) override { *static_cast<uint64_t*>(backing(word)) = value; }
    std::string name() const override { return "ConditionDefault"; }
};

struct ConditionTask : Task {
    void* word = nullptr;
    aclmdlRICondTaskType type = ACL_MODEL_RI_COND_TYPE_IF;
    std::vector<std::shared_ptr<Graph>> branches;

    Graph* selected() const {
        uint64_t value = *static_cast<uint64_t*>(backing(word));
        size_t index = type == ACL_MODEL_RI_COND_TYPE_SWITCH ? value
                       : value != 0                          ? 0
                       : type == ACL_MODEL_RI_COND_TYPE_IF   ? 1
                                                             : SIZE_MAX;
        return index < branches.size() ? branches[index].get() : nullptr;
    }
    Replay* replay(const Context& context) override {
        Replay& parent = *context.replay;
        std::unique_ptr<Replay>* child = nullptr;
        for (size_t i = 0; i < parent.lanes.size() && !child; ++i) {
            size_t next = parent.lanes[i].next;
            auto& tasks = parent.graph->lanes[i].tasks;
            if (next < tasks.size() && tasks[next].get() == this) child = &parent.lanes[i].child;
        }
        if (!*child) {
            Graph* graph = selected();
            if (!graph) return nullptr;
            for (auto& branch : branches) {
                if (branch.get() == graph) *child = std::make_unique<Replay>(branch, &parent);
            }
        } else if ((*child)->over() && type == ACL_MODEL_RI_COND_TYPE_WHILE && selected()) {
            (*child)->restart();
        }
        return child->get();
    }
    std::string name() const override {
        return type == ACL_MODEL_RI_COND_TYPE_IF ? "If" : type == ACL_MODEL_RI_COND_TYPE_WHILE ? "While" : "Switch";
    }
    std::vector<Dumped> dumped() const override { return {{"CONDITION_OP", "CONDITION_OP"}}; }
};

}  // namespace

void forget_conditions(Graph& graph) {
    for (void* word : graph.conditions) conditions().erase(word);
}

}  // namespace emulator

using namespace emulator;

extern "C" {

aclError aclmdlRICondHandleCreate(aclmdlRI handle, uint32_t value, aclmdlRICondHandleFlag flag,
                                  aclmdlRICondHandle* result) {
    Lock lock(machine().mutex);
    auto graph = find_graph(handle);
    if (!graph) return ACL_ERROR_RT_INVALID_HANDLE;
    void* word = allocate(graph->device, sizeof(uint64_t));
    if (!word)
        return fail(ACL_ERROR_RT_MEMORY_ALLOCATION,
                    format("device %d has no memory left for a condition handle", graph->device));
    graph->conditions.push_back(word);
    conditions()[word] = {word, graph};
    // Every replay first sets the default value.
    if (flag == ACL_MODEL_RI_COND_HANDLE_ASSIGN_DEFAULT)
        graph->defaults.push_back(std::make_shared<DefaultTask>(word, value));
    *result = word;
    return ACL_SUCCESS;
}

aclError aclmdlRICondHandleGetCondPtr(aclmdlRICondHandle handle, uint64_t** pointer) {
    Lock lock(machine().mutex);
    if (!conditions().count(handle))
        return fail(ACL_ERROR_RT_INVALID_HANDLE, format("%p is not a condition handle", handle));
    *pointer = static_cast<uint64_t*>(handle);
    return ACL_SUCCESS;
}

aclError aclmdlRIAddCondTask(aclmdlRICondTaskParams parameters, aclrtStream stream_handle, uint32_t) {
    Lock lock(machine().mutex);
    auto stream = find_stream(stream_handle);
    if (!stream) return no_such_stream(stream_handle);
    auto condition = conditions().find(parameters.handle);
    if (condition == conditions().end())
        return fail(ACL_ERROR_RT_INVALID_HANDLE, format("%p is not a condition handle", parameters.handle));
    if (!stream->capture) {
        return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED,
                    format("a conditional task requires a capture, but stream %d is not captured", stream->id));
    }
    uint32_t most = parameters.type == ACL_MODEL_RI_COND_TYPE_IF      ? 2
                    : parameters.type == ACL_MODEL_RI_COND_TYPE_WHILE ? 1
                                                                      : UINT32_MAX;
    if (parameters.size < 1 || parameters.size > most) {
        return fail(ACL_ERROR_RT_PARAM_INVALID,
                    format("a conditional task of type %d must have between 1 and %u graphs, but has %u",
                           static_cast<int>(parameters.type), most, parameters.size));
    }
    auto task = std::make_shared<ConditionTask>();
    task->word = condition->second.word;
    task->type = parameters.type;
    auto& parent = *stream->capture->graph;
    for (uint32_t i = 0; i < parameters.size; ++i) {
        auto branch = new_graph(parent.device);
        machine().graphs.add(branch);
        parent.branches.push_back(branch);
        task->branches.push_back(branch);
        parameters.modelRIArray[i] = branch.get();
    }
    return submit(*stream, task);
}

}  // extern "C"
