// What the emulator offers besides CUDA's functions, to what computes kernels: operations/, and Python through ctypes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

extern "C" {

// Puts a kernel on a stream.
cudaError_t emulated_cuda_enqueue(cudaStream_t stream, const char* kind, const std::function<void()>& run);

// The same for a function of Python's, that `run` knows by its number. It returns 0, or the cudaError_t that it fails
// with. `forget` is told when no queue and no graph holds the number any more.
cudaError_t emulated_cuda_enqueue_numbered(cudaStream_t stream, const char* kind, int (*run)(int64_t),
                                           void (*forget)(int64_t), int64_t number);

// Runs what is on the stream, where the emulator, and not the program, has to wait for it.
void emulated_cuda_drain(cudaStream_t stream);

bool emulated_cuda_is_captured(cudaStream_t stream);

// A kernel that runs has failed with a sticky error, such as cudaErrorAssert for a device-side assert.
void emulated_cuda_break(cudaError_t error, const char* what);

// Runs everything, before Python ends.
void emulated_cuda_finish();

}  // extern "C"
