// The part of CANN's runtime interface that triton-ascend compiles against. Written for the emulated CANN.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t rtError_t;
typedef void* rtStream_t;
typedef uint32_t rtMemType_t;
#define RT_ERROR_NONE 0
#define RT_MEMORY_HBM 0x2U
#define RT_MEMORY_HOST 0x81U
#define RT_DEV_BINARY_MAGIC_ELF 0x43554245U
#define RT_DEV_BINARY_MAGIC_ELF_AIVEC 0x41415246U

typedef enum { RT_MEMCPY_HOST_TO_HOST, RT_MEMCPY_HOST_TO_DEVICE, RT_MEMCPY_DEVICE_TO_HOST } rtMemcpyKind_t;

typedef enum {
    RT_LIMIT_TYPE_LOW_POWER_TIMEOUT,
    RT_LIMIT_TYPE_SIMT_WARP_STACK_SIZE,
    RT_LIMIT_TYPE_SIMT_DVG_WARP_STACK_SIZE,
    RT_LIMIT_TYPE_STACK_SIZE
} rtLimitType_t;

typedef struct {
    uint32_t magic, version;
    const void* data;
    uint64_t length;
} rtDevBinary_t;

rtError_t rtSetDevice(int32_t device);
rtError_t rtGetSocVersion(char* name, uint32_t room);
rtError_t rtGetAiCoreCount(uint32_t* count);
rtError_t rtStreamCreate(rtStream_t* stream, int32_t priority);
rtError_t rtStreamDestroy(rtStream_t stream);
rtError_t rtMalloc(void** address, uint64_t bytes, rtMemType_t type, uint16_t module);
rtError_t rtFree(void* address);
rtError_t rtMallocHost(void** address, uint64_t bytes, rtMemType_t type);
rtError_t rtFreeHost(void* address);
rtError_t rtMemcpy(void* target, uint64_t room, const void* source, uint64_t bytes, rtMemcpyKind_t kind);

// Refused: device binaries do not run on a CPU.
rtError_t rtDevBinaryRegister(const rtDevBinary_t* binary, void** handle);
rtError_t rtFunctionRegister(void* binary, const void* stub, const char* name, const void* function, uint32_t mode);
rtError_t rtDeviceSetLimit(int32_t device, rtLimitType_t type, uint32_t value);

#ifdef __cplusplus
}
#endif
