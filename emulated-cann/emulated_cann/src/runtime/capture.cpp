// Begins and ends captures, and refuses calls during captures. record.cpp adds tasks to their graphs.
#include "runtime/capture.h"

#include <algorithm>

DOCUMENTED(
    "runtime: docs/zh/api_ref/15_model_running_instance__management.md"
    "; runtime: docs/zh/dev_guide/04-01_single_stream_capture.md"
    "; runtime: docs/zh/api_ref/25-01_aclError.md");

namespace emulator {

namespace {

std::vector<Capture*>& captures() {  // active ones; guarded by the machine's lock
    static auto* all = new std::vector<Capture*>;
    return *all;
}
thread_local aclmdlRICaptureMode thread_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

// Removes every stream from the capture. Returns the graph.
std::shared_ptr<Graph> leave(Capture& capture) {
    std::erase(captures(), &capture);
    auto graph = capture.graph;
    graph->capturing = false;
    auto keep = capture.origin->capture;  // keeps the capture alive during the loop
    for (Stream* stream : capture.streams) {
        stream->capture.reset();
        stream->group.reset();
    }
    return graph;
}

int begin(aclrtStream handle, aclmdlRICaptureMode mode, std::shared_ptr<Graph> graph) {
    auto stream = find_stream(handle);
    if (!stream) return no_such_stream(handle);
    if (device_of(stream->device).default_stream == stream.get()) {
        return fail(ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT,
                    "the default stream cannot be captured; capture on a stream from aclrtCreateStream");
    }
    if (stream->capture) {
        return fail(ACL_ERROR_RT_STREAM_CAPTURED, format("stream %d must not be in a capture already", stream->id));
    }
    if (stream->updated_group) {
        UNDEFINED("the documents do not define the result of the update");
        return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS,
                    format("stream %d must not be updating a task group when its capture begins", stream->id));
    }
    bool is_new = !graph;
    if (is_new) graph = new_graph(stream->device);
    auto capture = std::make_shared<Capture>();
    capture->graph = graph;
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->origin = stream.get();
    if (int code = enter(*stream, capture, graph->lanes.empty())) {
        stream->capture.reset();
        return code;
    }
    graph->capturing = true;
    captures().push_back(capture.get());
    if (is_new) machine().graphs.add(graph);
    return ACL_SUCCESS;
}

}  // namespace

int refuse_while_capturing(const char* function, int code) {
    if (thread_mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return ACL_SUCCESS;
    Lock lock(machine().mutex);
    for (Capture* capture : captures()) {
        bool on_this_thread = capture->thread == std::this_thread::get_id();
        bool is_global = capture->mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL && thread_mode == capture->mode;
        if (is_global || (on_this_thread && capture->mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED)) {
            return fail(code, format("%s synchronizes and is not allowed during a capture; stream %d is captured",
                                     function, capture->origin->id));
        }
    }
    return ACL_SUCCESS;
}

int refuse_if_captured(Stream& stream, const char* action) {
    if (!stream.capture) return ACL_SUCCESS;
    return fail(ACL_ERROR_RT_STREAM_CAPTURED,
                format("%s is not allowed during a capture; stream %d is captured", action, stream.id));
}

}  // namespace emulator

using namespace emulator;

extern "C" {

aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode) {
    Lock lock(machine().mutex);
    return begin(stream, mode, nullptr);
}

aclError aclmdlRICaptureToModelRIBegin(aclrtStream stream, aclmdlRI handle, aclmdlRICaptureMode mode) {
    Lock lock(machine().mutex);
    auto graph = find_graph(handle);
    if (!graph) return ACL_ERROR_RT_INVALID_HANDLE;
    if (graph->capturing)
        return fail(ACL_ERROR_RT_MODEL_CAPTURED, format("graph %u must not be in a capture", graph->id));
    if (graph->running)
        return fail(ACL_ERROR_RT_MODEL_RUNNING,
                    format("graph %u must not be replaying when a capture into it begins", graph->id));
    return begin(stream, mode, graph);
}

aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus* status, aclmdlRI* graph) {
    Lock lock(machine().mutex);
    auto stream = find_stream(handle);
    if (!stream) return no_such_stream(handle);
    Capture* capture = stream->capture.get();
    *status = !capture           ? ACL_MODEL_RI_CAPTURE_STATUS_NONE
              : capture->invalid ? ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED
                                 : ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE;
    if (graph) *graph = capture ? capture->graph.get() : nullptr;
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* result) {
    std::shared_ptr<Graph> graph;  // destroyed without the lock
    Lock lock(machine().mutex);
    auto stream = find_stream(handle);
    if (!stream) return no_such_stream(handle);
    auto capture = stream->capture;
    if (!capture) return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, format("stream %d is not captured", stream->id));
    if (capture->origin != stream.get()) {
        return fail(
            ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED,
            format("the capture began on stream %d and cannot end on stream %d", capture->origin->id, stream->id));
    }
    // The capture ends here, also if an error is returned.
    int code = ACL_SUCCESS;
    if (capture->mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED && capture->thread != std::this_thread::get_id()) {
        code = fail(ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD,
                    "the capture must end on the thread where it began, unless its mode is relaxed");
    } else if (capture->invalid) {
        code = refuse_invalid(*capture);
    } else if (std::any_of(capture->streams.begin(), capture->streams.end(),
                           [](Stream* each) { return bool(each->group); })) {
        code = fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS,
                    "a task group is open at the end of the capture; call aclmdlRICaptureTaskGrpEnd first");
    } else if (Stream* left = unjoined(*capture)) {
        code = fail(ACL_ERROR_RT_STREAM_UNJOINED,
                    format("stream %d joined the capture and has work that stream %d does not wait for; record an "
                           "event on it and wait for the event before the end",
                           left->id, stream->id));
    }
    graph = leave(*capture);
    *result = code ? nullptr : graph.get();
    if (code) forget(*graph);
    lock.unlock();
    return code;
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
    std::swap(*mode, thread_mode);
    return ACL_SUCCESS;
}

}  // extern "C"
