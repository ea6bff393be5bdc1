// Kernels as compilers register and launch them. Their code is for GPUs, so it is not run: operations/ computes what
// torch's kernels do, above this. A kernel that is launched all the same is refused by its name.
#include <cstring>
#include <string>
#include <unordered_map>

#include "runtime/memory.h"
#include "runtime/stream.h"

using namespace emulated;

namespace {

std::unordered_map<const void*, std::string>& names() {  // by the function of the host that stands for the kernel
    static auto* all = new std::unordered_map<const void*, std::string>;
    return *all;
}

struct Launch {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
};
thread_local Launch next_launch;

cudaError_t launch(const void* function, cudaStream_t on) {
    Lock lock;
    Stream* stream = find(on);
    if (!stream) return report(cudaErrorInvalidResourceHandle);
    const std::string& name = names()[function];
    // torch.cuda._sleep: with a seed work is late anyhow.
    if (name.find("spin_kernel") != std::string::npos) return enqueue(*stream, "spin", [] {});
    return refuse(("the kernel " + name).c_str());
}

}  // namespace

extern "C" {

// What compilers call when a library is loaded. It tells kernels' names, and code that nothing here can run.
void** __cudaRegisterFatBinary(void*) {
    static void* handle;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
    Lock lock;
    names()[function] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

// function<<<grid, block, shared, stream>>>(...) pushes the four, and the function's stub pops them and launches.
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    next_launch = {grid, block, shared, stream};
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    *grid = next_launch.grid;
    *block = next_launch.block;
    *shared = next_launch.shared;
    *static_cast<cudaStream_t*>(stream) = next_launch.stream;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
    return launch(kernel, stream);
}
cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t stream) {
    return launch(function, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t stream) {
    return launch(function, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* function, void**) {
    return launch(function, how->stream);
}

// Questions by which torch chooses how to launch; any answer will do.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    *attributes = {};
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->binaryVersion = attributes->ptxVersion = options().major * 10 + options().minor;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
    *blocks = 1;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function, int threads,
                                                                   size_t shared, unsigned) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}
// Constants of kernels, which do not run.
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }

}  // extern "C"
