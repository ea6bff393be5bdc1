// The functions that triton-ascend links with: those of CANN's runtime interface below acl.
#include <cstring>

#include "home/include/runtime/runtime/rt.h"
#include "runtime/machine.h"

using namespace emulator;

namespace {

int no_binaries(const char* function) {
    OURS("not emulated");
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
                format("%s: the emulated CANN runs no device binaries; run Triton's kernels with TRITON_INTERPRET=1",
                       function));
}

}  // namespace

extern "C" {

rtError_t rtSetDevice(int32_t device) { return aclrtSetDevice(device); }

rtError_t rtGetSocVersion(char* name, uint32_t room) {
    const char* soc = aclrtGetSocName();
    OURS("the caller's buffer is too small");
    if (std::strlen(soc) >= room)
        return fail(ACL_ERROR_RT_PARAM_INVALID, format("the SoC's name needs more than %u bytes", room));
    std::strcpy(name, soc);
    return RT_ERROR_NONE;
}

rtError_t rtGetAiCoreCount(uint32_t* count) {
    int64_t value = 0;
    int code = aclrtGetDeviceInfo(0, ACL_DEV_ATTR_CUBE_CORE_NUM, &value);
    *count = static_cast<uint32_t>(value);
    return code;
}

rtError_t rtStreamCreate(rtStream_t* stream, int32_t) { return aclrtCreateStream(stream); }
rtError_t rtStreamDestroy(rtStream_t stream) { return aclrtDestroyStream(stream); }
rtError_t rtMalloc(void** address, uint64_t bytes, rtMemType_t, uint16_t) {
    return aclrtMalloc(address, bytes, ACL_MEM_MALLOC_HUGE_FIRST);
}
rtError_t rtFree(void* address) { return aclrtFree(address); }
rtError_t rtMallocHost(void** address, uint64_t bytes, rtMemType_t) { return aclrtMallocHost(address, bytes); }
rtError_t rtFreeHost(void* address) { return aclrtFreeHost(address); }
rtError_t rtMemcpy(void* target, uint64_t room, const void* source, uint64_t bytes, rtMemcpyKind_t kind) {
    return aclrtMemcpy(target, room, source, bytes, static_cast<aclrtMemcpyKind>(kind));
}

rtError_t rtDevBinaryRegister(const rtDevBinary_t*, void**) { return no_binaries("rtDevBinaryRegister"); }
rtError_t rtFunctionRegister(void*, const void*, const char*, const void*, uint32_t) {
    return no_binaries("rtFunctionRegister");
}
rtError_t rtDeviceSetLimit(int32_t, rtLimitType_t, uint32_t) { return no_binaries("rtDeviceSetLimit"); }

}  // extern "C"
