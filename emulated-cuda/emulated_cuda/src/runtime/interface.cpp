#include "runtime/interface.h"

#include "runtime/stream.h"

using namespace emulated;

extern "C" {

cudaError_t emulated_cuda_enqueue(cudaStream_t on, const char* kind, const std::function<void()>& run) {
    Lock lock;
    Stream* stream = find(on);
    return stream ? enqueue(*stream, kind, run) : report(cudaErrorInvalidResourceHandle);
}

cudaError_t emulated_cuda_enqueue_numbered(cudaStream_t on, const char* kind, int (*run)(int64_t),
                                           void (*forget)(int64_t), int64_t number) {
    std::shared_ptr<int64_t> held(new int64_t(number), [forget](int64_t* each) {
        forget(*each);
        delete each;
    });
    return emulated_cuda_enqueue(on, kind, [run, held] {
        if (int error = run(*held)) break_context(static_cast<cudaError_t>(error), "its traceback is above");
    });
}

void emulated_cuda_drain(cudaStream_t on) {
    Lock lock;
    if (Stream* stream = find(on)) drain(*stream);
}

bool emulated_cuda_is_captured(cudaStream_t on) {
    Lock lock;
    Stream* stream = find(on);
    return stream && stream->capture;
}

void emulated_cuda_break(cudaError_t error, const char* what) { break_context(error, what); }

void emulated_cuda_finish() {
    Lock lock;
    drain_everything();
}

}  // extern "C"
