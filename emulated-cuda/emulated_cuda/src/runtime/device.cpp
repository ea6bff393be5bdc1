// The devices: what they say of themselves is what an H100 says, but for the name, and the memory that was chosen.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "runtime/stream.h"

using namespace emulated;

namespace {

constexpr int version = 13000;       // CUDA 13.0, for which torch 2.11 is built
constexpr int clock_rate = 1980000;  // kHz

bool exists(int device) { return device >= 0 && device < options().devices; }

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
    *count = options().devices;
    return *count ? cudaSuccess : report(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* device) {
    *device = current_device();
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (!exists(device)) return report(cudaErrorInvalidDevice);
    current_device() = device;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* found) {
    *found = version;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* found) { return cudaDriverGetVersion(found); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    if (!exists(device)) return report(cudaErrorInvalidDevice);
    *properties = {};
    std::snprintf(properties->name, sizeof properties->name, "Emulated GPU");
    properties->major = options().major;
    properties->minor = options().minor;
    properties->totalGlobalMem = options().memory;
    properties->multiProcessorCount = 132;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = 0x7FFFFFFF;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 0xFFFF;
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerBlockOptin = 227 << 10;
    properties->sharedMemPerMultiprocessor = 228 << 10;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 1 << 16;
    properties->l2CacheSize = 50 << 20;
    properties->memoryBusWidth = 5120;
    properties->textureAlignment = 512;
    properties->unifiedAddressing = properties->managedMemory = properties->concurrentKernels = 1;
    properties->asyncEngineCount = 3;
    properties->pciBusID = device + 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp properties;
    if (cudaError_t error = cudaGetDeviceProperties(&properties, device)) return error;
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor:
            *value = properties.major;
            break;
        case cudaDevAttrComputeCapabilityMinor:
            *value = properties.minor;
            break;
        case cudaDevAttrMultiProcessorCount:
            *value = properties.multiProcessorCount;
            break;
        case cudaDevAttrWarpSize:
            *value = properties.warpSize;
            break;
        case cudaDevAttrMaxThreadsPerBlock:
            *value = properties.maxThreadsPerBlock;
            break;
        case cudaDevAttrMaxThreadsPerMultiProcessor:
            *value = properties.maxThreadsPerMultiProcessor;
            break;
        case cudaDevAttrMaxSharedMemoryPerBlock:
            *value = static_cast<int>(properties.sharedMemPerBlock);
            break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = static_cast<int>(properties.sharedMemPerBlockOptin);
            break;
        case cudaDevAttrClockRate:
            *value = clock_rate;
            break;
        default:
            *value = 0;  // what torch asks for besides are abilities that are not emulated
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
    std::snprintf(text, size, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 0;
    return cudaSuccess;
}

cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// Functions of the driver's library: ours, which is loaded under its name.
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
    static void* library = dlopen("libcuda.so.1", RTLD_NOW);
    *function = library ? dlsym(library, name) : nullptr;
    if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

}  // extern "C"
