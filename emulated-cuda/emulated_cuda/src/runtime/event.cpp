// Events: marks in a stream, that other streams and the host wait for.
#include <chrono>

#include "runtime/capture.h"
#include "runtime/stream.h"

namespace emulated {

namespace {

// Recorded on a captured stream, an event is a place in the graph instead of a moment.
struct Event {
    std::shared_ptr<Record> record;
    bool captured = false;
    unsigned long long capture = 0;  // whose number
    std::set<int> nodes;             // after which it lies
};

Event& event_of(cudaEvent_t handle) { return *reinterpret_cast<Event*>(handle); }

double milliseconds() {
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::milli>(now).count();
}

// cudaErrorCapturedEvent: a place in a graph is never reached, so the host cannot ask for it.
cudaError_t refuse_captured_event(const Event& event) {
    if (!event.captured) return cudaSuccess;
    if (Capture* capture = find_capture(event.capture)) invalidate(*capture);
    return report(cudaErrorCapturedEvent);
}

// A stream that waits for an event of a capture joins the capture: cudaStreamWaitEvent is how captures fork and join.
cudaError_t join_capture(Stream& stream, const Event& event) {
    Capture* capture = find_capture(event.capture);
    if (!capture) return report(cudaErrorCapturedEvent);
    if (stream.capture && stream.capture != capture) {
        invalidate(*capture);
        invalidate(*stream.capture);
        return report(cudaErrorStreamCaptureMerge);
    }
    if (is_legacy(stream)) {
        invalidate(*capture);
        return report(cudaErrorStreamCaptureImplicit);
    }
    if (!stream.capture) {
        stream.capture = capture;
        stream.tail.clear();
        capture->streams.insert(&stream);
    }
    stream.tail.insert(event.nodes.begin(), event.nodes.end());
    return cudaSuccess;
}

}  // namespace

}  // namespace emulated

using namespace emulated;

extern "C" {

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned) {
    *handle = reinterpret_cast<cudaEvent_t>(new Event);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    Lock lock;
    delete &event_of(handle);  // what is queued holds the record, not the event
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned flags) {
    Lock lock;
    Stream* stream = find(on);
    if (!stream) return report(cudaErrorInvalidResourceHandle);
    Event& event = event_of(handle);
    if (stream->capture && !(flags & cudaEventRecordExternal)) {
        if (stream->capture->invalid) return report(cudaErrorStreamCaptureInvalidated);
        event.captured = true;
        event.capture = stream->capture->id;
        event.nodes = stream->tail;
        return cudaSuccess;
    }
    auto record = std::make_shared<Record>(Record{stream});
    event.captured = false;
    event.record = record;
    return enqueue(*stream, "record", [record] {
        record->done = true;
        record->milliseconds = milliseconds();
    });
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t on) {
    return cudaEventRecordWithFlags(handle, on, cudaEventRecordDefault);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t waiting, cudaEvent_t handle, unsigned) {
    Lock lock;
    Stream* stream = find(waiting);
    if (!stream) return report(cudaErrorInvalidResourceHandle);
    Event& event = event_of(handle);
    if (event.captured) return join_capture(*stream, event);
    if (!event.record) return cudaSuccess;  // never recorded: nothing to wait for
    if (stream->capture) {                  // a graph cannot depend on what lies outside of it
        invalidate(*stream->capture);
        return report(cudaErrorStreamCaptureIsolation);
    }
    enqueue_wait(*stream, event.record);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
    Lock lock;
    Event& event = event_of(handle);
    if (cudaError_t error = refuse_captured_event(event)) return error;
    if (cudaError_t error = refuse_unsafe()) return error;
    go_on();
    if (broken()) return report(broken());
    return !event.record || event.record->done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    Lock lock;
    Event& event = event_of(handle);
    if (cudaError_t error = refuse_captured_event(event)) return error;
    if (event.record) drain(*event.record->stream, event.record.get());
    return report(broken());
}

cudaError_t cudaEventElapsedTime(float* elapsed, cudaEvent_t from, cudaEvent_t to) {
    Lock lock;
    auto start = event_of(from).record, end = event_of(to).record;
    if (!start || !end) return report(cudaErrorInvalidResourceHandle);
    if (!start->done || !end->done) return cudaErrorNotReady;
    *elapsed = static_cast<float>(end->milliseconds - start->milliseconds);
    return cudaSuccess;
}

}  // extern "C"
