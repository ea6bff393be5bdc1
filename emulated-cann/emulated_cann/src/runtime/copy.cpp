// Copies and fills. An asynchronous copy between the device and unpinned host memory is synchronous, as in CANN, and
// refused in a capture.
#include <cstring>

#include "runtime/capture.h"
#include "runtime/faults.h"
#include "runtime/memory.h"
#include "runtime/races.h"
#include "runtime/scheduler.h"
#include "runtime/trace.h"

DOCUMENTED("runtime: docs/zh/api_ref/11-03_memory_copy_and_set.md; runtime: docs/zh/api_ref/25-01_aclError.md");

namespace emulator {

namespace {

bool on_device(const void* address) { return owner(address) >= 0; }

// Returns the host pointer for an address. Throws DeviceError if the bytes are not allocated.
void* host_pointer(const void* address, size_t bytes, const char* verb) {
    int device = owner(address);
    if (device < 0) return const_cast<void*>(address);
    auto reason = objection(address, bytes, device);
    UNDEFINED("hardware may fault, or read or write other data");
    if (!reason.empty())
        throw DeviceError(ACL_ERROR_RT_SYS_DMA,
                          format("a copy %s %zu bytes that are not accessible: ", verb, bytes) + reason);
    return backing(address);
}

const char* direction(const void* to, const void* from) {
    if (on_device(to)) return on_device(from) ? "MemcpyDeviceToDevice" : "MemcpyHostToDevice";
    return on_device(from) ? "MemcpyDeviceToHost" : "MemcpyHostToHost";
}

Operand bytes_at(const void* address, size_t bytes, Access access) { return {address, bytes, access, ACL_UINT8, {}}; }

struct CopyTask : Task {
    CopyTask(void* to, const void* from, size_t bytes) : to(to), from(from), bytes(bytes) {}
    void* to;
    const void* from;
    size_t bytes;
    uint32_t call = call_stack();
    void run(const Context& context) override {
        auto begin = std::chrono::steady_clock::now();
        OURS("the program injects it with emulated_cann.faults");
        Injection injection;
        if (fault_at(Fault::copy, name(), &injection))
            throw DeviceError(injection.code, name() + ": fault injected by emulated_cann.faults");
        if (finding_races()) access_memory(context, name(), call, {bytes_at(to, bytes, Access::write),
                                                                   bytes_at(from, bytes, Access::read)});
        std::memmove(host_pointer(to, bytes, "writes"), host_pointer(from, bytes, "reads"), bytes);
        trace_event(TraceKind::copy, name(), context, bytes, begin, call);
    }
    std::string name() const override { return direction(to, from); }
    std::vector<Dumped> dumped() const override { return {{"MEMCPY_ASYNC", "MEMCPY_ASYNC"}}; }
};

struct FillTask : Task {
    FillTask(void* to, int value, size_t bytes) : to(to), value(value), bytes(bytes) {}
    void* to;
    int value;
    size_t bytes;
    uint32_t call = call_stack();
    void run(const Context& context) override {
        auto begin = std::chrono::steady_clock::now();
        if (finding_races()) access_memory(context, name(), call, {bytes_at(to, bytes, Access::write)});
        std::memset(host_pointer(to, bytes, "fills"), value, bytes);
        trace_event(TraceKind::fill, name(), context, bytes, begin, call);
    }
    std::string name() const override { return "Memset"; }
};

int check(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind) {
    if (!to || !from) return fail(ACL_ERROR_RT_PARAM_INVALID, "source and destination of a copy must not be null");
    if (bytes > room)
        return fail(ACL_ERROR_RT_PARAM_INVALID,
                    format("a copy must fit into the destination of %zu bytes, but has %zu", room, bytes));
    bool to_device = kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
    bool from_device = kind == ACL_MEMCPY_DEVICE_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
    bool plain = kind <= ACL_MEMCPY_DEVICE_TO_DEVICE;
    if (plain && (to_device != on_device(to) || from_device != on_device(from))) {
        return fail(ACL_ERROR_RT_PARAM_INVALID,
                    format("kind %d of a copy must match its addresses, %p to %p, which require %s",
                           static_cast<int>(kind), from, to, direction(to, from)));
    }
    return ACL_SUCCESS;
}

// Runs the task immediately on this thread. The caller must have synchronized with other users of the memory.
int run_now(Task& task) {
    static auto* no_stream = new Stream;  // the stream of synchronous work in traces
    no_stream->id = -1;
    try {
        task.run({*no_stream, nullptr});
    } catch (const DeviceError& error) {
        return fail(error.code, error.what());
    }
    Lock lock(machine().mutex);
    wake_blocked();
    return ACL_SUCCESS;
}

int submit_copy(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind, aclrtStream handle) {
    if (int code = refuse_after_task_queue()) return code;
    if (int code = check(to, room, from, bytes, kind)) return code;
    bool crosses_host = on_device(to) != on_device(from);
    bool waits = crosses_host && !pinned(on_device(to) ? from : to, bytes);
    auto task = std::make_shared<CopyTask>(to, from, bytes);
    Lock lock(machine().mutex);
    auto stream = find_stream(handle);
    if (!stream) return no_such_stream(handle);
    if (waits && stream->capture) {
        return fail(ACL_ERROR_RT_PARAM_INVALID,
                    format("%s of %zu bytes: the host memory at %p is not pinned, so the copy would synchronize, but "
                           "stream %d is captured; pin the memory",
                           task->name().c_str(), bytes, on_device(to) ? from : to, stream->id));
    }
    if (waits) {
        lock.unlock();
        if (int code = refuse_while_capturing(task->name().c_str(), ACL_ERROR_RT_CAPTURE_MODE_BLOCK_ASYNC)) return code;
        lock.lock();
    }
    if (int code = submit(*stream, task)) return code;
    if (!waits) return ACL_SUCCESS;
    UNDEFINED("on hardware the host would wait indefinitely");
    uint64_t target = stream->submitted;
    if (wait_until(lock, [&] { return stream->completed >= target; })) {
        host_acquires(*stream);
        return ACL_SUCCESS;
    }
    return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "the device is stalled: " + what_holds(*stream));
}

}  // namespace

}  // namespace emulator

using namespace emulator;

extern "C" {

aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind) {
    if (!bytes) return ACL_SUCCESS;
    if (int code = refuse_while_capturing("aclrtMemcpy")) return code;
    if (int code = refuse_after_task_queue()) return code;
    if (int code = check(to, room, from, bytes, kind)) return code;
    CopyTask task(to, from, bytes);
    return run_now(task);
}

aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind,
                          aclrtStream stream) {
    return bytes ? submit_copy(to, room, from, bytes, kind, stream) : ACL_SUCCESS;
}

// CANN decides whether to synchronize. The emulated aclrtMemcpyAsync does so already.
aclError aclrtMemcpyAsyncWithCondition(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind,
                                       aclrtStream stream) {
    return aclrtMemcpyAsync(to, room, from, bytes, kind, stream);
}

aclError aclrtMemcpyBatch(void** to, size_t* rooms, void** from, size_t* sizes, size_t count, aclrtMemcpyBatchAttr*,
                          size_t*, size_t, size_t* failed) {
    for (size_t i = 0; i < count; ++i) {
        if (int code = aclrtMemcpy(to[i], rooms[i], from[i], sizes[i], ACL_MEMCPY_DEFAULT)) {
            *failed = i;
            return code;
        }
    }
    return ACL_SUCCESS;
}

aclError aclrtMemcpyBatchAsync(void** to, size_t* rooms, void** from, size_t* sizes, size_t count,
                               aclrtMemcpyBatchAttr*, size_t*, size_t, size_t* failed, aclrtStream stream) {
    for (size_t i = 0; i < count; ++i) {
        if (int code = aclrtMemcpyAsync(to[i], rooms[i], from[i], sizes[i], ACL_MEMCPY_DEFAULT, stream)) {
            *failed = i;
            return code;
        }
    }
    return ACL_SUCCESS;
}

aclError aclrtMemset(void* to, size_t room, int32_t value, size_t bytes) {
    if (int code = refuse_while_capturing("aclrtMemset")) return code;
    if (bytes > room)
        return fail(ACL_ERROR_RT_PARAM_INVALID,
                    format("a fill must fit into the destination of %zu bytes, but has %zu", room, bytes));
    FillTask task(to, value, bytes);
    return run_now(task);
}

aclError aclrtMemsetAsync(void* to, size_t room, int32_t value, size_t bytes, aclrtStream handle) {
    if (bytes > room)
        return fail(ACL_ERROR_RT_PARAM_INVALID,
                    format("a fill must fit into the destination of %zu bytes, but has %zu", room, bytes));
    auto task = std::make_shared<FillTask>(to, value, bytes);
    Lock lock(machine().mutex);
    auto stream = find_stream(handle);
    return stream ? submit(*stream, task) : no_such_stream(handle);
}

}  // extern "C"
