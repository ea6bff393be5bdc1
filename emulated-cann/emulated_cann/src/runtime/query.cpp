// Properties of the device and of CANN: names, versions and sizes.
#include <cstdlib>
#include <cstring>

#include "runtime/memory.h"

DOCUMENTED(
    "runtime: docs/zh/api_ref/04_device_management.md"
    "; runtime: docs/zh/api_ref/11-01_device_memory_malloc_and_free.md"
    "; runtime: docs/zh/api_ref/13_exception_handling.md");

using namespace emulator;

namespace {

constexpr int64_t l2_bytes = int64_t{192} << 20;

int unknown(const char* function, int what) {
    OURS("not emulated");
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, format("%s: attribute %d is not emulated", function, what));
}

}  // namespace

namespace emulator {

const std::string& soc_name() { return machine().options.soc; }

int cann_release() {
    const char* version = machine().options.version.c_str();
    char* rest = nullptr;
    int major = static_cast<int>(std::strtol(version, &rest, 10));
    return 100 * major + (*rest == '.' ? static_cast<int>(std::strtol(rest + 1, nullptr, 10)) : 0);
}

}  // namespace emulator

extern "C" {

const char* aclrtGetSocName() { return machine().options.soc.c_str(); }

aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
    *version = {};
    std::strncpy(version->version, machine().options.version.c_str(), sizeof(version->version) - 1);
    return ACL_SUCCESS;
}

// All packages of the emulated CANN have the same version.
aclError aclsysGetVersionStr(char*, char* version) {
    std::strcpy(version, machine().options.version.c_str());
    return ACL_SUCCESS;
}

aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t* value) {
    if (device >= machine().options.devices)
        return fail(ACL_ERROR_RT_INVALID_DEVICEID,
                    format("the device number must be less than %ld (option `devices`), but is %u",
                           static_cast<long>(machine().options.devices), device));
    switch (attribute) {
        case ACL_DEV_ATTR_AICPU_CORE_NUM:
            *value = 6;
            return ACL_SUCCESS;
        case ACL_DEV_ATTR_AICORE_CORE_NUM:
        case ACL_DEV_ATTR_CUBE_CORE_NUM:
            *value = cube_cores;
            return ACL_SUCCESS;
        case ACL_DEV_ATTR_VECTOR_CORE_NUM:
            *value = vector_cores;
            return ACL_SUCCESS;
        case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE:
            *value = machine().options.memory;
            return ACL_SUCCESS;
        case ACL_DEV_ATTR_L2_CACHE_SIZE:
            *value = l2_bytes;
            return ACL_SUCCESS;
        case ACL_DEV_ATTR_PHY_CHIP_ID:
            *value = device;
            return ACL_SUCCESS;
        case ACL_DEV_ATTR_SMP_ID:
        case ACL_DEV_ATTR_IS_VIRTUAL:
            *value = 0;
            return ACL_SUCCESS;
        default:
            return unknown("aclrtGetDeviceInfo", attribute);
    }
}

aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo what, int64_t* value) {
    switch (what) {
        case ACL_DEVICE_INFO_AI_CORE_NUM:
            return aclrtGetDeviceInfo(device, ACL_DEV_ATTR_CUBE_CORE_NUM, value);
        case ACL_DEVICE_INFO_VECTOR_CORE_NUM:
            return aclrtGetDeviceInfo(device, ACL_DEV_ATTR_VECTOR_CORE_NUM, value);
        case ACL_DEVICE_INFO_L2_SIZE:
            return aclrtGetDeviceInfo(device, ACL_DEV_ATTR_L2_CACHE_SIZE, value);
        default:
            return unknown("aclGetDeviceCapability", what);
    }
}

// Supports infinities, NaN and bfloat16, and no just-in-time compilation.
aclError aclGetCannAttributeList(const aclCannAttr** list, size_t* count) {
    static const aclCannAttr attributes[] = {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16};
    *list = attributes;
    *count = 2;
    return ACL_SUCCESS;
}

aclError aclGetCannAttribute(aclCannAttr attribute, int32_t* value) {
    *value = attribute == ACL_CANN_ATTR_INF_NAN || attribute == ACL_CANN_ATTR_BF16;
    return ACL_SUCCESS;
}

// Reports one module, which owns all memory.
aclError aclrtGetMemUsageInfo(int32_t device, aclrtMemUsageInfo* usage, size_t room, size_t* count) {
    if (device < 0 || device >= machine().options.devices) {
        return fail(ACL_ERROR_RT_INVALID_DEVICEID,
                    format("the device number must be between 0 and %ld (option `devices`), but is %d",
                           static_cast<long>(machine().options.devices) - 1, device));
    }
    *count = room ? 1 : 0;
    if (!room) return ACL_SUCCESS;
    std::lock_guard lock(memory_mutex());
    usage[0] = {};
    std::strcpy(usage[0].name, "emulated");
    usage[0].curMemSize = accounts(device).used;
    usage[0].memPeakSize = accounts(device).peak;
    return ACL_SUCCESS;
}

// Ascend950 reports what to repair after an error. No emulated error requires a repair.
aclError aclrtGetErrorVerbose(int32_t device, aclrtErrorInfo* info) {
    if (device < 0 || device >= machine().options.devices) {
        return fail(ACL_ERROR_RT_INVALID_DEVICEID,
                    format("the device number must be between 0 and %ld (option `devices`), but is %d",
                           static_cast<long>(machine().options.devices) - 1, device));
    }
    *info = {};
    info->errorType = ACL_RT_NO_ERROR;
    return ACL_SUCCESS;
}

// Utilization is not measured, because the device is a share of the host's cores.
aclError aclrtGetDeviceUtilizationRate(int32_t, aclrtUtilizationInfo* utilization) {
    utilization->cubeUtilization = utilization->vectorUtilization = utilization->aicpuUtilization = 0;
    utilization->memoryUtilization = 0;
    return ACL_SUCCESS;
}

}  // extern "C"
