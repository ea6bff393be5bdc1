// Memory of the devices, and of the host as far as CUDA knows of it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace emulated {

// What CUDA knows of an address: cudaMemoryTypeDevice, cudaMemoryTypeHost (pinned), or cudaMemoryTypeUnregistered.
cudaMemoryType type_of(const void* address);

}  // namespace emulated
