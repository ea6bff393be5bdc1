// Copies and fills. What of them the host waits for depends on the memory: copies from and to pinned memory are work as
// any other; from pageable memory a copy takes the bytes before it returns, and to it the copy is done when it returns.
#include <cstring>
#include <string>

#include "runtime/capture.h"
#include "runtime/memory.h"
#include "runtime/stream.h"

using namespace emulated;

namespace {

cudaError_t copy(void* to, const void* from, size_t size, Stream& stream) {
    bool from_pageable = type_of(from) == cudaMemoryTypeUnregistered;
    bool to_pageable = type_of(to) == cudaMemoryTypeUnregistered;
    if (from_pageable || to_pageable) {  // which a graph could not repeat: cudaErrorStreamCaptureUnsupported
        if (cudaError_t error = refuse_captured(stream)) return error;
    }
    if (from_pageable && !to_pageable) {
        auto bytes = std::make_shared<std::string>(static_cast<const char*>(from), size);
        return enqueue(stream, "copy", [=] { std::memcpy(to, bytes->data(), size); });
    }
    if (cudaError_t error = enqueue(stream, "copy", [=] { std::memmove(to, from, size); })) return error;
    if (to_pageable) drain(stream);
    return report(to_pageable ? broken() : cudaSuccess);
}

}  // namespace

extern "C" {

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t on) {
    Lock lock;
    Stream* stream = find(on);
    return stream ? copy(to, from, size, *stream) : report(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t on) {
    return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, on);
}

// Counted as unsafe in a capture, since it waits: refuse_unsafe().
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
    Lock lock;
    if (cudaError_t error = refuse_unsafe()) return error;
    Stream& stream = *find(cudaStreamLegacy);
    if (cudaError_t error = enqueue(stream, "copy", [=] { std::memmove(to, from, size); })) return error;
    drain(stream);
    return report(broken());
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t on) {
    Lock lock;
    for (size_t row = 0; row < height; ++row) {
        auto* target = static_cast<char*>(to) + row * to_pitch;
        auto* source = static_cast<const char*>(from) + row * from_pitch;
        if (cudaError_t error = cudaMemcpyAsync(target, source, width, cudaMemcpyDefault, on)) return error;
    }
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t on) {
    Lock lock;
    Stream* stream = find(on);
    if (!stream) return report(cudaErrorInvalidResourceHandle);
    return enqueue(*stream, "memset", [=] { std::memset(to, value, size); });
}

cudaError_t cudaMemset(void* to, int value, size_t size) { return cudaMemsetAsync(to, value, size, cudaStreamLegacy); }

}  // extern "C"
