#include "runtime/error.h"

#include <atomic>
#include <cstdio>
#include <utility>

namespace emulated {

namespace {

thread_local cudaError_t last = cudaSuccess;
std::atomic<cudaError_t> sticky{cudaSuccess};

struct Text {
    const char *name, *words;
};

// The words are CUDA's own: torch shows them, and the driver's errors are told apart by them.
Text text_of(cudaError_t error) {
    switch (error) {
#define TEXT(name, words) \
    case name:            \
        return {#name, words}
        TEXT(cudaSuccess, "no error");
        TEXT(cudaErrorInvalidValue, "invalid argument");
        TEXT(cudaErrorMemoryAllocation, "out of memory");
        TEXT(cudaErrorInvalidSymbol, "invalid device symbol");
        TEXT(cudaErrorInvalidDeviceFunction, "invalid device function");
        TEXT(cudaErrorInvalidDevice, "invalid device ordinal");
        TEXT(cudaErrorInvalidResourceHandle, "invalid resource handle");
        TEXT(cudaErrorIllegalState, "the operation cannot be performed in the present state");
        TEXT(cudaErrorNotReady, "device not ready");
        TEXT(cudaErrorIllegalAddress, "an illegal memory access was encountered");
        TEXT(cudaErrorAssert, "device-side assert triggered");
        TEXT(cudaErrorLaunchFailure, "unspecified launch failure");
        TEXT(cudaErrorNotSupported, "operation not supported");
        TEXT(cudaErrorOperatingSystem, "OS call failed or operation not supported on this OS");
        TEXT(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing");
        TEXT(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture");
        TEXT(cudaErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences");
        TEXT(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began");
        TEXT(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work");
        TEXT(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream");
        TEXT(cudaErrorStreamCaptureImplicit,
             "operation would make the legacy stream depend on a capturing blocking stream");
        TEXT(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream");
        TEXT(cudaErrorStreamCaptureWrongThread,
             "attempt to terminate a thread-local capture sequence from another thread");
#undef TEXT
        default:
            return {"cudaErrorUnknown", "unrecognized error code"};
    }
}

}  // namespace

cudaError_t report(cudaError_t error) {
    // cudaErrorNotReady is an answer, not a failure.
    if (error != cudaSuccess && error != cudaErrorNotReady) last = error;
    return error;
}

void break_context(cudaError_t error, const std::string& what) {
    std::fprintf(stderr, "emulated CUDA: a kernel failed: %s\n", what.c_str());
    cudaError_t none = cudaSuccess;
    sticky.compare_exchange_strong(none, error);  // the first failure is the one that is told
}

cudaError_t broken() { return sticky; }

cudaError_t refuse(const char* function) {
    std::fprintf(stderr, "emulated CUDA: %s is not emulated\n", function);
    return report(cudaErrorNotSupported);
}

}  // namespace emulated

using namespace emulated;

extern "C" {

cudaError_t cudaGetLastError() { return broken() ? broken() : std::exchange(last, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return broken() ? broken() : last; }
const char* cudaGetErrorName(cudaError_t error) { return text_of(error).name; }
const char* cudaGetErrorString(cudaError_t error) { return text_of(error).words; }

}  // extern "C"
