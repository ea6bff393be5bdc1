#include "runtime/stream.h"

#include <exception>

#include "runtime/capture.h"

namespace emulated {

namespace {

Stream& legacy_stream(int device) {
    static Stream* all[max_devices];
    if (!all[device]) {
        all[device] = new Stream;
        all[device]->device = device;
        streams().insert(all[device]);
    }
    return *all[device];
}

void run_next(Stream& stream) {
    Work work = std::move(stream.queue.front());
    stream.queue.pop_front();
    if (work.wait) {
        if (!work.wait->done) drain(*work.wait->stream, work.wait.get());
        return;
    }
    if (broken()) return;
    stream.running = true;
    try {
        work.run();
    } catch (const std::exception& error) {
        break_context(cudaErrorLaunchFailure, error.what());
    }
    stream.running = false;
}

// The legacy stream waits for what is on blocking streams, and they for what is on it.
void join_legacy(Stream& stream) {
    if (is_legacy(stream)) {
        for (Stream* other : std::set<Stream*>(streams())) {
            if (other != &stream && other->device == stream.device && other->blocking()) drain(*other);
        }
    } else if (stream.blocking()) {
        drain(legacy_stream(stream.device));
    }
}

// Where a call ended that has run work: CUDA returns the failure of a kernel from the call that waits for it.
cudaError_t outcome() { return report(broken()); }

}  // namespace

int& current_device() {
    static thread_local int device = 0;
    return device;
}

std::set<Stream*>& streams() {
    static auto* all = new std::set<Stream*>;
    return *all;
}

Stream* find(cudaStream_t handle) {
    if (!handle || handle == cudaStreamLegacy || handle == cudaStreamPerThread) {
        return &legacy_stream(current_device());
    }
    auto* stream = reinterpret_cast<Stream*>(handle);
    return streams().count(stream) ? stream : nullptr;
}

bool is_legacy(const Stream& stream) { return &stream == &legacy_stream(stream.device); }

cudaError_t enqueue(Stream& stream, const char* kind, Function run) {
    if (broken()) return report(broken());
    if (stream.capture) return add_node(stream, kind, std::move(run));
    if (cudaError_t error = refuse_implicit(stream)) return error;
    join_legacy(stream);
    stream.queue.push_back({std::move(run), nullptr});
    if (options().reordered) {
        go_on();
    } else {
        drain(stream);
    }
    return cudaSuccess;
}

void enqueue_wait(Stream& stream, std::shared_ptr<Record> record) {
    stream.queue.push_back({nullptr, std::move(record)});
    if (options().reordered) {
        go_on();
    } else {
        drain(stream);
    }
}

void drain(Stream& stream, const Record* record) {
    while (!stream.running && !stream.queue.empty() && !(record && record->done)) run_next(stream);
}

void drain_device(int device) {
    for (Stream* stream : std::set<Stream*>(streams())) {
        if (stream->device == device) drain(*stream);
    }
}

void drain_everything() {
    for (int device = 0; device < options().devices; ++device) drain_device(device);
}

void go_on() {
    if (!options().reordered) return;
    for (Stream* stream : std::set<Stream*>(streams())) {
        if (stream->queue.empty() || draw(8)) continue;
        for (unsigned left = draw(4); left && !stream->running && !stream->queue.empty(); --left) run_next(*stream);
    }
}

}  // namespace emulated

using namespace emulated;

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int priority) {
    Lock lock;
    auto* stream = new Stream;
    stream->device = current_device();
    stream->flags = flags;
    stream->priority = priority;
    streams().insert(stream);
    *handle = reinterpret_cast<cudaStream_t>(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* handle) {
    return cudaStreamCreateWithPriority(handle, cudaStreamDefault, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    Lock lock;
    Stream* stream = find(handle);
    if (!stream || is_legacy(*stream)) return report(cudaErrorInvalidResourceHandle);
    if (stream->capture) invalidate(*stream->capture);
    drain(*stream);
    streams().erase(stream);  // and not deleted: records of events may point to it
    return outcome();
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
    Lock lock;
    Stream* stream = find(handle);
    if (!stream) return report(cudaErrorInvalidResourceHandle);
    *priority = stream->priority;
    return cudaSuccess;
}

// A captured stream has nothing to wait for: nothing of it runs. Nor may the host wait for the legacy stream, which
// would have to wait for blocking streams that are captured.
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    Lock lock;
    Stream* stream = find(handle);
    if (!stream) return report(cudaErrorInvalidResourceHandle);
    if (cudaError_t error = refuse_captured(*stream)) return error;
    if (cudaError_t error = refuse_implicit(*stream)) return error;
    join_legacy(*stream);
    drain(*stream);
    return outcome();
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
    Lock lock;
    Stream* stream = find(handle);
    if (!stream) return report(cudaErrorInvalidResourceHandle);
    if (cudaError_t error = refuse_captured(*stream)) return error;
    go_on();
    if (broken()) return outcome();
    return stream->queue.empty() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaDeviceSynchronize() {
    Lock lock;
    if (cudaError_t error = refuse_device_wait(current_device())) return error;
    drain_device(current_device());
    return outcome();
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
    Lock lock;
    Stream* stream = find(handle);
    if (!stream) return report(cudaErrorInvalidResourceHandle);
    return enqueue(*stream, "host function", [=] { function(data); });
}

// The older kind of host function cannot be captured.
cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void* data, unsigned) {
    Lock lock;
    Stream* stream = find(handle);
    if (!stream) return report(cudaErrorInvalidResourceHandle);
    if (cudaError_t error = refuse_captured(*stream)) return error;
    return enqueue(*stream, "callback", [=] { function(handle, cudaSuccess, data); });
}

}  // extern "C"
