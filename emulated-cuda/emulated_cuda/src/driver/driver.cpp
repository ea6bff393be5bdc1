// The library of NVIDIA's driver, as far as torch, Triton and FlashInfer look whether it is there. torch allocates and
// launches through the runtime, so nearly nothing of it is called.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) {
    *version = 13000;
    return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) {
    *text = "an error of the emulated CUDA driver";
    return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** name) { return cuGetErrorString(error, name); }
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
    static int only;
    *context = reinterpret_cast<CUcontext>(&only);
    return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    // The runtime's attributes have the driver's numbers.
    return static_cast<CUresult>(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
}

// Mappings of memory (PYTORCH_ALLOC_CONF=expandable_segments:True), and waits for values in memory.
#define REFUSED(function, ...)                                                  \
    CUresult function(__VA_ARGS__) {                                            \
        std::fprintf(stderr, "emulated CUDA: " #function " is not emulated\n"); \
        return CUDA_ERROR_NOT_SUPPORTED;                                        \
    }
REFUSED(cuMemAddressReserve, CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long)
REFUSED(cuMemAddressFree, CUdeviceptr, size_t)
REFUSED(cuMemCreate, CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*, unsigned long long)
REFUSED(cuMemRelease, CUmemGenericAllocationHandle)
REFUSED(cuMemMap, CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long)
REFUSED(cuMemUnmap, CUdeviceptr, size_t)
REFUSED(cuMemSetAccess, CUdeviceptr, size_t, const CUmemAccessDesc*, size_t)
REFUSED(cuMemGetAllocationGranularity, size_t*, const CUmemAllocationProp*, CUmemAllocationGranularity_flags)
REFUSED(cuMemExportToShareableHandle, void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
        unsigned long long)
REFUSED(cuMemImportFromShareableHandle, CUmemGenericAllocationHandle*, void*, CUmemAllocationHandleType)
REFUSED(cuMemRetainAllocationHandle, CUmemGenericAllocationHandle*, void*)
REFUSED(cuMemGetAllocationPropertiesFromHandle, CUmemAllocationProp*, CUmemGenericAllocationHandle)
// What Triton launches compiled kernels with: here its interpreter runs them.
REFUSED(cuModuleLoadData, CUmodule*, const void*)
REFUSED(cuModuleGetFunction, CUfunction*, CUmodule, const char*)
REFUSED(cuFuncGetAttribute, int*, CUfunction_attribute, CUfunction)
REFUSED(cuFuncSetAttribute, CUfunction, CUfunction_attribute, int)
REFUSED(cuFuncSetCacheConfig, CUfunction, CUfunc_cache)
REFUSED(cuDevicePrimaryCtxRetain, CUcontext*, CUdevice)
REFUSED(cuCtxGetLimit, size_t*, CUlimit)
REFUSED(cuCtxSetLimit, CUlimit, size_t)
REFUSED(cuMemsetD32Async, CUdeviceptr, unsigned, size_t, CUstream)
REFUSED(cuStreamWriteValue32, CUstream, CUdeviceptr, cuuint32_t, unsigned)

}  // extern "C"
