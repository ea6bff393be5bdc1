// Stream capture: which streams are captured, and what CUDA refuses meanwhile.
#pragma once

#include <set>
#include <thread>

#include "runtime/graph.h"
#include "runtime/stream.h"

namespace emulated {

struct Capture {
    unsigned long long id;
    cudaStreamCaptureMode mode;
    Stream* origin;  // on which it began, and must end
    std::thread::id thread;
    Graph* graph;
    std::set<Stream*> streams;  // the origin, and those that joined
    bool invalid = false;       // something was refused: all that remains is to end it
};

Capture* find_capture(unsigned long long id);
void invalidate(Capture& capture);

// Puts work into the graph, behind what the stream has put there before or waited for.
cudaError_t add_node(Stream& stream, const char* kind, Function run);

// Each of these returns cudaSuccess, or reports what CUDA does and invalidates the capture that is in the way.

// cudaErrorStreamCaptureUnsupported, of a call that CUDA counts as unsafe while anything is captured, such as
// cudaMalloc: which captures matter is a question of their modes and of the thread's
// (cudaThreadExchangeStreamCaptureMode).
cudaError_t refuse_unsafe();
// cudaErrorStreamCaptureUnsupported, of a call that waits for the stream, or asks how far it is.
cudaError_t refuse_captured(Stream& stream);
// cudaErrorStreamCaptureUnsupported, of a wait for the whole device.
cudaError_t refuse_device_wait(int device);
// cudaErrorStreamCaptureImplicit, of the legacy stream while a stream that it would have to wait for is captured.
cudaError_t refuse_implicit(Stream& stream);

}  // namespace emulated
