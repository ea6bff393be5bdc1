// Devices and contexts. Each device has only its primary context.
#include <cstring>

#include "runtime/machine.h"
#include "runtime/stream.h"

DOCUMENTED(
    "runtime: docs/zh/api_ref/04_device_management.md"
    "; runtime: docs/zh/api_ref/05_context_management.md"
    "; runtime: docs/zh/api_ref/25-01_aclError.md");

namespace emulator {

namespace {

thread_local int thread_device = -1;

// A context is the device's number plus one, so that none is null.
aclrtContext context_of(int device) { return reinterpret_cast<aclrtContext>(static_cast<intptr_t>(device) + 1); }

bool exists(int device) { return device >= 0 && device < machine().options.devices; }

int no_such_device(int device) {
    return fail(ACL_ERROR_RT_INVALID_DEVICEID,
                format("the device number must be between 0 and %ld (option `devices`), but is %d",
                       static_cast<long>(machine().options.devices) - 1, device));
}

}  // namespace

Machine& machine() {
    static auto* only = new Machine;
    return *only;
}

int current_device() { return thread_device < 0 ? 0 : thread_device; }

Device& device_of(int index) {
    auto& devices = machine().devices;
    if (devices.empty()) {
        devices.resize(machine().options.devices);
        for (size_t i = 0; i < devices.size(); ++i) devices[i].index = static_cast<int>(i);
    }
    return devices.at(index);
}

}  // namespace emulator

using namespace emulator;

extern "C" {

aclError aclInit(const char*) { return ACL_SUCCESS; }

aclError aclFinalize() {
    stop_workers();
    return ACL_SUCCESS;
}

aclError aclrtGetDeviceCount(uint32_t* count) {
    *count = static_cast<uint32_t>(machine().options.devices);
    return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
    if (!exists(device)) return no_such_device(device);
    Lock lock(machine().mutex);
    device_of(device).active = true;
    thread_device = device;
    return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t* device) {
    if (thread_device < 0)
        return ACL_ERROR_RT_CONTEXT_NULL;  // no message, because callers use the code to test for a device
    *device = thread_device;
    return ACL_SUCCESS;
}

aclError aclrtResetDevice(int32_t device) {
    if (!exists(device)) return no_such_device(device);
    // Keeps the memory, because allocators free theirs after this call, at the end of the process.
    int code = synchronize_device(device, -1);
    Lock lock(machine().mutex);
    device_of(device).active = false;
    if (thread_device == device) thread_device = -1;
    return code;
}

aclError aclrtGetCurrentContext(aclrtContext* context) {
    if (thread_device < 0)
        return fail(ACL_ERROR_RT_CONTEXT_NULL, "this thread has no context; call aclrtSetDevice first");
    *context = context_of(thread_device);
    return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
    auto device = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
    if (!exists(device)) return fail(ACL_ERROR_RT_PARAM_INVALID, format("%p is not a context", context));
    thread_device = device;
    return ACL_SUCCESS;
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
    if (!exists(device)) return no_such_device(device);
    Lock lock(machine().mutex);
    if (flags) *flags = 0;
    *active = device_of(device).active;
    return ACL_SUCCESS;
}

aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t device, int32_t peer) {
    if (!exists(device)) return no_such_device(device);
    if (!exists(peer)) return no_such_device(peer);
    *can = device != peer;
    return ACL_SUCCESS;
}

// No effect: copies between devices always work, and kernels cannot access another device's memory.
aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t) {
    return exists(peer) ? ACL_SUCCESS : no_such_device(peer);
}

aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t* const logic) {
    if (!exists(user)) return no_such_device(user);
    *logic = user;
    return ACL_SUCCESS;
}

aclError aclrtDeviceGetUuid(int32_t device, aclrtUuid* uuid) {
    if (!exists(device)) return no_such_device(device);
    std::memset(uuid->bytes, 0, sizeof(uuid->bytes));
    std::memcpy(uuid->bytes, "emulated", 8);
    uuid->bytes[15] = static_cast<char>(device);
    return ACL_SUCCESS;
}

}  // extern "C"
