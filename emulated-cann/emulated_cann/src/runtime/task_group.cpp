// Task groups: kernels in a graph that an update can replace.
#include <utility>

#include "runtime/capture.h"
#include "runtime/trace.h"

DOCUMENTED(
    "runtime: docs/zh/api_ref/15_model_running_instance__management.md"
    "; runtime: docs/zh/api_ref/25-01_aclError.md");

namespace emulator {

namespace {

// A task group in its lane. A replay runs the tasks that the group holds at that time.
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

// The update runs on the update stream. A replay that does not wait for it may run the old tasks.
struct UpdateTask : Task {
    std::shared_ptr<TaskGroup> group;
    std::shared_ptr<Graph> graph;
    std::vector<TaskPointer> tasks;
    void run(const Context& context) override {
        trace_event(TraceKind::update, "TaskUpdate", context, 0, std::chrono::steady_clock::now());
        Lock lock(machine().mutex);
        group->tasks.swap(tasks);
    }
    std::string name() const override { return "TaskUpdate"; }
};

// Adds the stream's open group to its lane. Returns its handle.
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
                    format("a task group requires a capture, but stream %d is not captured", stream->id));
    }
    if (stream->group) {
        return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS,
                    format("stream %d has an open task group; task groups cannot be nested", stream->id));
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
                    format("a task group requires a capture, but stream %d is not captured", stream->id));
    }
    if (!stream->group) {
        return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS,
                    format("stream %d has no open task group; call aclmdlRICaptureTaskGrpBegin first", stream->id));
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
    if (!group)
        return fail(ACL_ERROR_RT_INVALID_HANDLE, format("%p is not a task group of a live graph", group_handle));
    if (int code = refuse_if_captured(*stream, "aclmdlRICaptureTaskUpdateBegin")) return code;
    // An update with an error never ends, because the error propagates past the end call in callers such as torch_npu's
    // NPUGraph.update. A new update may then begin. The group of the failed one keeps its tasks.
    if (stream->updated_group && stream->update_began == failures()) {
        fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS,
             format("stream %d must not be updating a task group already", stream->id));
        stream->update_began = failures();  // does not count this error as the update's
        return ACL_ERROR_STREAM_TASK_GROUP_STATUS;
    }
    if (group->graph->capturing) {
        return fail(ACL_ERROR_RT_MODEL_CAPTURED,
                    format("graph %u of the task group must not be in a capture", group->graph->id));
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
        return fail(
            ACL_ERROR_STREAM_TASK_GROUP_STATUS,
            format("stream %d is not updating a task group; call aclmdlRICaptureTaskUpdateBegin first", stream->id));
    }
    bool same = tasks.size() == group->tasks.size();
    for (size_t i = 0; same && i < tasks.size(); ++i) same = tasks[i]->name() == group->tasks[i]->name();
    if (!same) {
        auto names = [](const std::vector<TaskPointer>& all) {
            std::string text;
            for (auto& each : all) text += (text.empty() ? "" : ", ") + each->name();
            return "[" + text + "]";
        };
        return fail(ACL_ERROR_RT_MODEL_UPDATE_FAILED, "an update must launch the kernels that the task group holds, " +
                                                          names(group->tasks) + ", but launched " + names(tasks));
    }
    auto task = std::make_shared<UpdateTask>();
    task->group = group;
    task->graph = machine().graphs.find(group->graph);
    task->tasks = std::move(tasks);
    return submit(*stream, task);
}

}  // extern "C"
