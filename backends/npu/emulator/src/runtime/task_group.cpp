// Task groups: kernels in a graph that an update can replace while the graph stays.
#include <utility>

#include "runtime/capture.h"
#include "runtime/trace.h"

DOCUMENTED(
    "runtime: docs/zh/api_ref/15_model_running_instance__management.md"
    "; runtime: docs/zh/api_ref/25-01_aclError.md");

namespace emulator {

namespace {

// A task group in its lane. What an update puts into the group later is what the next replay runs.
struct GroupTask : Task {
    std::shared_ptr<TaskGroup> group;
    void run(const Context& context) override {
        std::vector<TaskPointer> tasks;
        {
            Lock lock(machine().mutex);
            tasks = group->tasks;
        }
        for (auto& task : tasks) task->run(context);
    }
    std::string name() const override { return "TaskGroup"; }
    std::vector<Dumped> dumped() const override {
        std::vector<Dumped> all;
        for (auto& task : group->tasks)
            for (auto& each : task->dumped()) all.push_back(each);
        return all;
    }
};

// The update itself is work of the update stream: a replay that does not wait for it may run the old tasks.
struct UpdateTask : Task {
    std::shared_ptr<TaskGroup> group;
    std::shared_ptr<Graph> graph;
    std::vector<TaskPointer> tasks;
    void run(const Context& context) override {
        trace_event(TraceKind::update, "TaskUpdate", context, 0);
        Lock lock(machine().mutex);
        group->tasks.swap(tasks);
    }
    std::string name() const override { return "TaskUpdate"; }
};

// Puts the stream's open group into its lane, and hands out its handle.
void* close_group(Stream& stream) {
    auto& graph = *stream.capture->graph;
    auto group = std::exchange(stream.group, nullptr);
    group->graph = &graph;
    graph.groups.push_back(group);
    auto task = std::make_shared<GroupTask>();
    task->group = group;
    graph.lanes[stream.lane].tasks.push_back(task);
    return machine().groups.add(group);
}

}  // namespace

}  // namespace emulator

using namespace emulator;

extern "C" {

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
    Lock lock(machine().mutex);
    auto stream = find_stream(handle);
    if (!stream) return no_such_stream(handle);
    if (!stream->capture) {
        return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED,
                    format("a task group needs a capture; stream %d has none", stream->id));
    }
    if (stream->group) {
        return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS,
                    format("stream %d has a task group open: groups do not nest", stream->id));
    }
    stream->group = std::make_shared<TaskGroup>();
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp* result) {
    Lock lock(machine().mutex);
    auto stream = find_stream(handle);
    if (!stream) return no_such_stream(handle);
    if (!stream->capture) {
        return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED,
                    format("a task group needs a capture; stream %d has none", stream->id));
    }
    if (!stream->group) {
        return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS,
                    format("stream %d has no task group open that could end", stream->id));
    }
    if (stream->capture->invalid) {
        stream->group.reset();
        return refuse_invalid(*stream->capture);
    }
    *result = close_group(*stream);
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group_handle) {
    Lock lock(machine().mutex);
    auto stream = find_stream(handle);
    if (!stream) return no_such_stream(handle);
    auto group = machine().groups.find(group_handle);
    if (!group) return fail(ACL_ERROR_RT_INVALID_HANDLE, format("%p is no task group of a live graph", group_handle));
    if (int code = refuse_if_captured(*stream, "updating a task group")) return code;
    // An update in which something failed was never ended: who issues kernels between the two calls, as
    // torch_npu's NPUGraph.update does, is thrown out by one that is refused. Its group keeps what it held.
    if (stream->updated_group && stream->update_began == failures()) {
        fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, format("stream %d is updating a task group already", stream->id));
        stream->update_began = failures();  // this failure is not the update's
        return ACL_ERROR_STREAM_TASK_GROUP_STATUS;
    }
    if (group->graph->capturing) {
        return fail(ACL_ERROR_RT_MODEL_CAPTURED,
                    format("graph %u of the task group is being captured", group->graph->id));
    }
    stream->updated_group = group;
    stream->update.clear();
    stream->update_began = failures();
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
    Lock lock(machine().mutex);
    auto stream = find_stream(handle);
    if (!stream) return no_such_stream(handle);
    auto group = std::exchange(stream->updated_group, nullptr);
    auto tasks = std::exchange(stream->update, {});
    if (!group) {
        return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, format("stream %d is not updating a task group", stream->id));
    }
    bool same = tasks.size() == group->tasks.size();
    for (size_t i = 0; same && i < tasks.size(); ++i) same = tasks[i]->name() == group->tasks[i]->name();
    if (!same) {
        auto names = [](const std::vector<TaskPointer>& all) {
            std::string text;
            for (auto& each : all) text += (text.empty() ? "" : ", ") + each->name();
            return "[" + text + "]";
        };
        return fail(ACL_ERROR_RT_MODEL_UPDATE_FAILED, "an update must issue the kernels that the task group holds, " +
                                                          names(group->tasks) + ", but issued " + names(tasks));
    }
    auto task = std::make_shared<UpdateTask>();
    task->group = group;
    task->graph = machine().graphs.find(group->graph);
    task->tasks = std::move(tasks);
    return submit(*stream, task);
}

}  // extern "C"
