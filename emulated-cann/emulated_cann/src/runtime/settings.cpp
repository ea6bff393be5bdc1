// Settings of the runtime. Most have no effect in the emulator, for the reason beside each. Reads return the value that
// was set. Settings that would change results are refused.
#include <atomic>
#include <cstring>

#include "acl/acl_op_compiler.h"
#include "runtime/faults.h"
#include "runtime/stream.h"

DOCUMENTED("runtime: docs/zh/api_ref/03_runtime_configuration.md");

namespace emulator {

namespace {

std::atomic<uint64_t> execution_limit{0};        // microseconds; 0: none
std::atomic<int64_t> parameters[3] = {0, 0, 0};  // indexed by aclSysParamOpt

}  // namespace

int within_execution_limit(int milliseconds) {
    uint64_t limit = execution_limit / 1000;
    return limit && limit < static_cast<uint64_t>(milliseconds) ? static_cast<int>(limit) : milliseconds;
}

}  // namespace emulator

using namespace emulator;

extern "C" {

// No effect: a host thread that waits for a stalled stream fails after the option `stall`.
aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }

// The limit applies only to hangs injected by emulated_cann.faults, because kernels take longer on a CPU.
aclError aclrtSetOpExecuteTimeOut(uint32_t seconds) {
    execution_limit = uint64_t{1000000} * seconds;
    return ACL_SUCCESS;
}
aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t* actual) {
    execution_limit = *actual = timeout;
    return ACL_SUCCESS;
}

// Arithmetic follows IEEE 754.
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
    if (mode == ACL_RT_OVERFLOW_MODE_INFNAN) return ACL_SUCCESS;
    OURS("not emulated");
    return fail(
        ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
        format("overflow mode %d is not emulated; only ACL_RT_OVERFLOW_MODE_INFNAN is", static_cast<int>(mode)));
}

// No effect: overflow raises no error, as on hardware in the mode INFNAN.
aclError aclrtSetStreamOverflowSwitch(aclrtStream handle, uint32_t flag) {
    Lock lock(machine().mutex);
    auto stream = find_stream(handle);
    if (!stream) return no_such_stream(handle);
    stream->overflow_switch = flag;
    return ACL_SUCCESS;
}
aclError aclrtGetStreamOverflowSwitch(aclrtStream handle, uint32_t* flag) {
    Lock lock(machine().mutex);
    auto stream = find_stream(handle);
    if (!stream) return no_such_stream(handle);
    *flag = stream->overflow_switch;
    return ACL_SUCCESS;
}

// No effect: all operations are deterministic.
aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    if (option > ACL_OPT_STRONG_CONSISTENCY)
        return fail(ACL_ERROR_RT_PARAM_INVALID,
                    format("%d is not a value of aclSysParamOpt", static_cast<int>(option)));
    parameters[option] = value;
    return ACL_SUCCESS;
}
aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
    if (option > ACL_OPT_STRONG_CONSISTENCY)
        return fail(ACL_ERROR_RT_PARAM_INVALID,
                    format("%d is not a value of aclSysParamOpt", static_cast<int>(option)));
    *value = parameters[option];
    return ACL_SUCCESS;
}
// Sets the same parameters, because each device has one context and no function reads a context's parameters.
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }

// There is no operator compiler. "disable" (for ACL_OP_JIT_COMPILE) makes torch_npu call aclnn instead of compiling.
aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }
size_t aclGetCompileoptSize(aclCompileOpt) { return sizeof("disable"); }
aclError aclGetCompileopt(aclCompileOpt, char* value, size_t length) {
    std::strncpy(value, "disable", length);
    return ACL_SUCCESS;
}

// No effect, because collectives are not emulated. torch_npu sets their determinism for every device.
int HcclSetConfig(int, int32_t) { return 0; }

// Drops torch_npu's messages for CANN's log files.
void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}

}  // extern "C"

namespace {

// Core limits have no effect and can only be read back.
struct CoreLimits {
    uint32_t of[2] = {cube_cores, vector_cores};
};
std::map<void*, CoreLimits>& core_limits() {  // by stream, or by device number
    static auto* all = new std::map<void*, CoreLimits>;
    return *all;
}
void* key_of(int device) { return reinterpret_cast<void*>(static_cast<intptr_t>(device)); }
thread_local void* stream_in_use = nullptr;

int read_limit(void* key, aclrtDevResLimitType type, uint32_t* value) {
    if (type > ACL_RT_DEV_RES_VECTOR_CORE)
        return fail(ACL_ERROR_RT_PARAM_INVALID,
                    format("%d is not a value of aclrtDevResLimitType", static_cast<int>(type)));
    Lock lock(machine().mutex);
    *value = core_limits()[key].of[type];
    return ACL_SUCCESS;
}

int write_limit(void* key, aclrtDevResLimitType type, uint32_t value) {
    if (type > ACL_RT_DEV_RES_VECTOR_CORE)
        return fail(ACL_ERROR_RT_PARAM_INVALID,
                    format("%d is not a value of aclrtDevResLimitType", static_cast<int>(type)));
    uint32_t most = CoreLimits().of[type];
    if (value < 1 || value > most) {
        return fail(ACL_ERROR_RT_PARAM_INVALID,
                    format("the number of cores must be between 1 and %u, but is %u", most, value));
    }
    Lock lock(machine().mutex);
    core_limits()[key].of[type] = value;
    return ACL_SUCCESS;
}

int drop_limits(void* key) {
    Lock lock(machine().mutex);
    core_limits().erase(key);
    return ACL_SUCCESS;
}

}  // namespace

extern "C" {

aclError aclrtGetDeviceResLimit(int32_t device, aclrtDevResLimitType type, uint32_t* value) {
    return read_limit(key_of(device), type, value);
}
aclError aclrtSetDeviceResLimit(int32_t device, aclrtDevResLimitType type, uint32_t value) {
    return write_limit(key_of(device), type, value);
}
aclError aclrtResetDeviceResLimit(int32_t device) { return drop_limits(key_of(device)); }
aclError aclrtGetStreamResLimit(aclrtStream stream, aclrtDevResLimitType type, uint32_t* value) {
    return read_limit(stream, type, value);
}
aclError aclrtSetStreamResLimit(aclrtStream stream, aclrtDevResLimitType type, uint32_t value) {
    return write_limit(stream, type, value);
}
aclError aclrtResetStreamResLimit(aclrtStream stream) { return drop_limits(stream); }
aclError aclrtUseStreamResInCurrentThread(aclrtStream stream) {
    stream_in_use = stream;
    return ACL_SUCCESS;
}
aclError aclrtUnuseStreamResInCurrentThread(aclrtStream) {
    stream_in_use = nullptr;
    return ACL_SUCCESS;
}
aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t* value) {
    return read_limit(stream_in_use ? stream_in_use : key_of(current_device()), type, value);
}

}  // extern "C"
