#include "runtime/capture.h"

#include <map>
#include <memory>
#include <utility>

namespace emulated {

namespace {

std::map<unsigned long long, Capture*>& captures() {  // those under way
    static auto* all = new std::map<unsigned long long, Capture*>;
    return *all;
}

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

cudaError_t refuse_in(Capture& capture, cudaError_t error) {
    invalidate(capture);
    return report(error);
}

// Whether every node is followed by another, or by the end of the stream that the capture ends on.
bool joined(const Capture& capture) {
    std::set<int> followed(capture.origin->tail);
    for (auto& node : capture.graph->nodes) followed.insert(node->depends.begin(), node->depends.end());
    return followed.size() == capture.graph->nodes.size();
}

}  // namespace

Capture* find_capture(unsigned long long id) {
    auto found = captures().find(id);
    return found == captures().end() ? nullptr : found->second;
}

void invalidate(Capture& capture) { capture.invalid = true; }

cudaError_t add_node(Stream& stream, const char* kind, Function run) {
    Capture& capture = *stream.capture;
    if (capture.invalid) return report(cudaErrorStreamCaptureInvalidated);
    auto& nodes = capture.graph->nodes;
    int index = static_cast<int>(nodes.size());
    nodes.push_back(std::make_shared<Node>(
        Node{index, kind, std::move(run), std::vector<int>(stream.tail.begin(), stream.tail.end())}));
    stream.tail = {index};
    return cudaSuccess;
}

cudaError_t refuse_unsafe() {
    if (broken()) return report(broken());
    if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
    for (auto& [id, capture] : captures()) {
        if (capture->mode == cudaStreamCaptureModeRelaxed) continue;
        bool mine = capture->thread == std::this_thread::get_id();
        bool everywhere = capture->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
        if (mine || everywhere) return refuse_in(*capture, cudaErrorStreamCaptureUnsupported);
    }
    return cudaSuccess;
}

cudaError_t refuse_captured(Stream& stream) {
    return stream.capture ? refuse_in(*stream.capture, cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t refuse_device_wait(int device) {
    for (auto& [id, capture] : captures()) {
        if (capture->origin->device == device) return refuse_in(*capture, cudaErrorStreamCaptureUnsupported);
    }
    return cudaSuccess;
}

cudaError_t refuse_implicit(Stream& stream) {
    if (!is_legacy(stream)) return cudaSuccess;
    for (Stream* other : streams()) {
        if (other->capture && other->device == stream.device && other->blocking()) {
            return refuse_in(*other->capture, cudaErrorStreamCaptureImplicit);
        }
    }
    return cudaSuccess;
}

}  // namespace emulated

using namespace emulated;

extern "C" {

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    std::swap(*mode, thread_mode);
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    static unsigned long long next = 0;
    Lock lock;
    Stream* stream = find(handle);
    if (!stream) return report(cudaErrorInvalidResourceHandle);
    if (is_legacy(*stream)) return report(cudaErrorStreamCaptureUnsupported);
    if (stream->capture) return report(cudaErrorIllegalState);
    auto* capture = new Capture{++next, mode, stream, std::this_thread::get_id(), new_graph(), {stream}};
    captures().emplace(capture->id, capture);
    stream->capture = capture;
    stream->tail.clear();
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
    Lock lock;
    *graph = nullptr;
    Stream* stream = find(handle);
    if (!stream) return report(cudaErrorInvalidResourceHandle);
    std::unique_ptr<Capture> capture(stream->capture);
    if (!capture) return report(cudaErrorIllegalState);
    // After these two the capture goes on, until it is ended where it began.
    if (capture->origin != stream) return refuse_in(*capture.release(), cudaErrorStreamCaptureUnmatched);
    if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id()) {
        capture.release();
        return report(cudaErrorStreamCaptureWrongThread);
    }
    cudaError_t error = cudaSuccess;
    if (capture->invalid) {
        error = cudaErrorStreamCaptureInvalidated;
    } else if (!joined(*capture)) {
        error = cudaErrorStreamCaptureUnjoined;
    }
    for (Stream* each : capture->streams) {
        each->capture = nullptr;
        each->tail.clear();
    }
    captures().erase(capture->id);
    if (error) {
        delete_graph(capture->graph);
    } else {
        *graph = reinterpret_cast<cudaGraph_t>(capture->graph);
    }
    return report(error);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
    Lock lock;
    Stream* stream = find(handle);
    if (!stream) return report(cudaErrorInvalidResourceHandle);
    if (cudaError_t error = refuse_implicit(*stream)) return error;
    *status = !stream->capture           ? cudaStreamCaptureStatusNone
              : stream->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                         : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** depends,
                                     const cudaGraphEdgeData** edges, size_t* count) {
    static thread_local std::vector<cudaGraphNode_t> tail;  // which the caller reads until its next call
    Lock lock;
    if (cudaError_t error = cudaStreamIsCapturing(handle, status)) return error;
    Stream& stream = *find(handle);
    tail.clear();
    if (stream.capture) {
        for (int each : stream.tail) {
            tail.push_back(reinterpret_cast<cudaGraphNode_t>(stream.capture->graph->nodes[each].get()));
        }
        if (id) *id = stream.capture->id;
        if (graph) *graph = reinterpret_cast<cudaGraph_t>(stream.capture->graph);
    }
    if (depends) *depends = tail.data();
    if (edges) *edges = nullptr;
    if (count) *count = tail.size();
    return cudaSuccess;
}

}  // extern "C"
