// The errors of CUDA's runtime: the last one of a thread, and the one after which the process is served no more.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace emulated {

// Notes the error as the thread's last, for cudaGetLastError, and returns it.
cudaError_t report(cudaError_t error);

// A kernel failed while it ran. As in CUDA, the error is sticky: every later call returns it, in every thread, and no
// more work runs. `what` is written to stderr, as a device-side assert writes its message.
void break_context(cudaError_t error, const std::string& what);

// The sticky error, or cudaSuccess.
cudaError_t broken();

// A call that is not emulated: says so on stderr, and returns cudaErrorNotSupported.
cudaError_t refuse(const char* function);

}  // namespace emulated
