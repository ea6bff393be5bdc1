// What torch links to and the emulator does not do: it says so when it is called. Pools of memory and cudaMallocAsync
// are those of torch's other allocator (PYTORCH_ALLOC_CONF=backend:cudaMallocAsync).
#include "runtime/error.h"

using emulated::refuse;

extern "C" {

#define REFUSED(function, ...) \
    cudaError_t function(__VA_ARGS__) { return refuse(#function); }

REFUSED(cudaDeviceEnablePeerAccess, int, unsigned)
REFUSED(cudaGetSymbolAddress, void**, const void*)
REFUSED(cudaMallocAsync, void**, size_t, cudaStream_t)
REFUSED(cudaFreeAsync, void*, cudaStream_t)
REFUSED(cudaDeviceGetDefaultMemPool, cudaMemPool_t*, int)
REFUSED(cudaMemPoolGetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
REFUSED(cudaMemPoolSetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
REFUSED(cudaMemPoolSetAccess, cudaMemPool_t, const cudaMemAccessDesc*, size_t)
REFUSED(cudaMemPoolTrimTo, cudaMemPool_t, size_t)
REFUSED(cudaIpcGetMemHandle, cudaIpcMemHandle_t*, void*)
REFUSED(cudaIpcOpenMemHandle, void**, cudaIpcMemHandle_t, unsigned)
REFUSED(cudaIpcCloseMemHandle, void*)
REFUSED(cudaIpcGetEventHandle, cudaIpcEventHandle_t*, cudaEvent_t)
REFUSED(cudaIpcOpenEventHandle, cudaEvent_t*, cudaIpcEventHandle_t)

}  // extern "C"
