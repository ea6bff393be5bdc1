// Adds tasks and edges to the graph of a capture: tasks to the lane of their stream, and edges between lanes for
// events.
#include "runtime/capture.h"
#include "runtime/event.h"
#include "runtime/faults.h"
#include "runtime/races.h"

DOCUMENTED(
    "runtime: docs/zh/api_ref/15_model_running_instance__management.md"
    "; runtime: docs/zh/dev_guide/04-02_cross_stream_capture.md"
    "; runtime: docs/zh/api_ref/25-01_aclError.md");

namespace emulator {

namespace {

// The recording of an event in one lane, and a wait for it in another.
struct EdgeRecord : Task {
    size_t edge;
    void finish(const Context& context) override {
        if (auto& released = context.replay->released; edge < released.size()) release_to(released[edge], context);
        context.replay->signalled[edge] = true;
    }
    bool is_instant() const override { return true; }
    std::string name() const override { return "EventRecord"; }
    std::vector<Dumped> dumped() const override { return {{format("EVENT_RECORD_%zu", edge), "EVENT_RECORD"}}; }
};
struct EdgeWait : Task {
    size_t edge;
    bool ready(const Context& context) override { return context.replay->signalled[edge]; }
    void finish(const Context& context) override {
        if (auto& released = context.replay->released; edge < released.size()) acquire_from(released[edge], context);
    }
    bool is_instant() const override { return true; }
    std::string name() const override { return "EventWait"; }
    std::vector<Dumped> dumped() const override { return {{format("EVENT_WAIT_%zu", edge), "EVENT_WAIT"}}; }
};

}  // namespace

int refuse_invalid(Capture& capture) {
    return fail(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED,
                format("the capture is invalid because of an earlier error: %d: ", capture.invalid.code) +
                    capture.invalid.reason);
}

int enter(Stream& stream, const std::shared_ptr<Capture>& capture, bool new_lane) {
    Graph& graph = *capture->graph;
    Device& device = device_of(graph.device);
    if (new_lane) {
        if (fault_at(Fault::stream) || device.streams >= machine().options.streams) {
            return invalidate(*capture, ACL_ERROR_RT_NO_STREAM_RESOURCE,
                              format("device %d has no stream left for the captured stream %d: %ld of %ld are in use, "
                                     "including those of captured graphs (option `streams`)",
                                     device.index, stream.id, static_cast<long>(device.streams.load()),
                                     static_cast<long>(machine().options.streams)));
        }
        ++device.streams;
        graph.lanes.emplace_back();
    }
    stream.lane = new_lane ? graph.lanes.size() - 1 : 0;
    stream.capture = capture;
    capture->streams.push_back(&stream);
    return ACL_SUCCESS;
}

Stream* unjoined(Capture& capture) {
    Graph& graph = *capture.graph;
    graph.lanes[0].joined = graph.lanes[0].tasks.size();
    for (bool changed = true; changed;) {
        changed = false;
        for (auto& lane : graph.lanes) {
            for (size_t i = 0; i < lane.joined; ++i) {
                auto* wait = dynamic_cast<EdgeWait*>(lane.tasks[i].get());
                if (!wait) continue;
                auto& edge = graph.edges[wait->edge];
                size_t& joined = graph.lanes[edge.lane].joined;
                if (joined <= edge.position) {
                    joined = edge.position + 1;
                    changed = true;
                }
            }
        }
    }
    for (Stream* stream : capture.streams) {
        auto& lane = graph.lanes[stream->lane];
        for (size_t i = lane.joined; i < lane.tasks.size(); ++i) {
            Task* task = lane.tasks[i].get();
            if (!dynamic_cast<EdgeRecord*>(task) && !dynamic_cast<EdgeWait*>(task)) return stream;
        }
    }
    return nullptr;
}

int invalidate(Capture& capture, int code, const std::string& reason) {
    if (!capture.invalid) capture.invalid = {code, reason};
    return fail(code, reason);
}

int record(Stream& stream, TaskPointer task) {
    Capture& capture = *stream.capture;
    if (capture.invalid) return ACL_SUCCESS;  // the end of the capture reports the error
    Graph& graph = *capture.graph;
    Device& device = device_of(graph.device);
    if (device.tasks >= machine().options.tasks) {
        return invalidate(capture, ACL_ERROR_RT_NO_STREAM_RESOURCE,
                          format("captured graphs of device %d have %ld tasks, the maximum (option `tasks`)",
                                 device.index, static_cast<long>(device.tasks.load())));
    }
    Stream* group_owner = nullptr;
    for (Stream* each : capture.streams) {
        if (each->group) group_owner = each;
    }
    if (group_owner && !stream.group) {
        return invalidate(capture, ACL_ERROR_STREAM_TASK_GROUP_INTR,
                          format("%s on stream %d is not allowed while stream %d of the capture has an open task group",
                                 task->name().c_str(), stream.id, group_owner->id));
    }
    if (stream.group) {
        if (!task->is_kernel()) {
            return invalidate(capture, ACL_ERROR_RT_TASK_TYPE_NOT_SUPPORT,
                              format("%s on stream %d is not allowed in its task group, which can hold only kernels",
                                     task->name().c_str(), stream.id));
        }
        stream.group->tasks.push_back(std::move(task));
    } else {
        graph.lanes[stream.lane].tasks.push_back(std::move(task));
    }
    ++graph.tasks;
    ++device.tasks;
    return ACL_SUCCESS;
}

int record_edge(Stream& stream, const std::shared_ptr<Event>& event) {
    auto task = std::make_shared<EdgeRecord>();
    Graph& graph = *stream.capture->graph;
    task->edge = graph.edges.size();
    size_t position = graph.lanes[stream.lane].tasks.size();
    if (int code = record(stream, task)) return code;
    graph.edges.push_back({stream.lane, position});
    event->captured = true;
    event->capture = stream.capture;
    event->edge = task->edge;
    event->mark = nullptr;
    return ACL_SUCCESS;
}

int join(Stream& stream, const std::shared_ptr<Capture>& capture, size_t edge) {
    if (capture->invalid) return refuse_invalid(*capture);
    if (!stream.capture) {
        if (stream.device != capture->graph->device) {
            return invalidate(*capture, ACL_ERROR_RT_CAPTURE_DEPENDENCY,
                              format("streams of a capture must be on the same device, but stream %d is on device %d "
                                     "and the capture on device %d",
                                     stream.id, stream.device, capture->graph->device));
        }
        if (int code = enter(stream, capture, true)) return code;
    } else if (stream.capture != capture) {
        invalidate(*capture, ACL_ERROR_STREAM_CAPTURE_CONFLICT,
                   "a stream of another capture waits for an event of this capture");
        return invalidate(*stream.capture, ACL_ERROR_STREAM_CAPTURE_CONFLICT,
                          format("stream %d must not wait for an event of another capture", stream.id));
    }
    auto task = std::make_shared<EdgeWait>();
    task->edge = edge;
    return record(stream, task);
}

}  // namespace emulator
