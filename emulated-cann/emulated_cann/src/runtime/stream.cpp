// The API of streams.
#include "runtime/stream.h"

#include <algorithm>
#include <utility>

#include "runtime/capture.h"
#include "runtime/faults.h"
#include "runtime/races.h"
#include "runtime/scheduler.h"

DOCUMENTED("runtime: docs/zh/api_ref/06_stream_management.md; runtime: docs/zh/api_ref/25-01_aclError.md");

namespace emulator {

namespace {

std::shared_ptr<Stream> create_stream(int device, uint32_t priority, uint32_t flags) {
    static int ids = 0;
    auto stream = std::make_shared<Stream>();
    stream->id = ids++;
    stream->device = device;
    stream->priority = priority;
    stream->flags = flags;
    ++device_of(device).streams;
    return stream;
}

int create(aclrtStream* handle, uint32_t priority, uint32_t flags) {
    Lock lock(machine().mutex);
    Device& device = device_of(current_device());
    if (fault_at(Fault::stream) || device.streams >= machine().options.streams) {
        return fail(ACL_ERROR_RT_NO_STREAM_RESOURCE, format("device %d has no stream left: %ld of %ld are in use, "
                                                            "including those of captured graphs (option `streams`)",
                                                            device.index, static_cast<long>(device.streams.load()),
                                                            static_cast<long>(machine().options.streams)));
    }
    *handle = machine().streams.add(create_stream(device.index, priority, flags));
    return ACL_SUCCESS;
}

int destroy(aclrtStream handle, bool force) {
    Lock lock(machine().mutex);
    auto stream = machine().streams.find(handle);
    if (!stream) return no_such_stream(handle);
    if (stream->capture) {
        return fail(ACL_ERROR_RT_STREAM_CAPTURED,
                    format("stream %d must not be destroyed while it is captured", stream->id));
    }
    if (force) {
        // The running task finishes. The others are dropped, except event records, which other streams may wait for.
        stream->failure = {ACL_ERROR_RT_STREAM_ABORT, "the stream was destroyed",
                           std::make_shared<std::set<uint64_t>>()};
        stream->stop_on_failure = true;
        wake(*stream);
    }
    wait_until(lock, [&] { return stream->queue.empty(); });
    host_acquires(*stream);
    stream->destroyed = true;
    stream->wake.notify_all();
    machine().streams.remove(handle);
    --device_of(stream->device).streams;
    lock.unlock();
    return ACL_SUCCESS;
}

int with_stream(aclrtStream handle, const std::function<int(Stream&)>& act) {
    Lock lock(machine().mutex);
    auto stream = find_stream(handle);
    return stream ? act(*stream) : no_such_stream(handle);
}

int synchronize(aclrtStream handle, int milliseconds) {
    if (int code = refuse_after_task_queue()) return code;
    Lock lock(machine().mutex);
    auto stream = find_stream(handle);
    return stream ? synchronize(lock, *stream, milliseconds) : no_such_stream(handle);
}

}  // namespace

std::shared_ptr<Stream> find_stream(aclrtStream handle) {
    if (handle) return machine().streams.find(handle);
    Device& device = device_of(current_device());
    if (!device.default_stream) {
        auto stream = create_stream(device.index, 0, 0);
        device.default_stream = stream.get();
        machine().streams.add(stream);
    }
    return machine().streams.find(device.default_stream);
}

int no_such_stream(aclrtStream handle) {
    return fail(ACL_ERROR_RT_INVALID_HANDLE, format("%p is not a live stream", handle));
}

int submit(Stream& stream, TaskPointer task) {
    if (stream.updated_group) {
        if (!task->is_kernel()) {
            return fail(
                ACL_ERROR_RT_FEATURE_NOT_SUPPORT_UPDATE_OP,
                format("%s is not allowed on stream %d while it updates a task group, which can hold only kernels",
                       task->name().c_str(), stream.id));
        }
        stream.update.push_back(std::move(task));
        return ACL_SUCCESS;
    }
    if (stream.capture) return record(stream, std::move(task));
    // Clears a failure that the host knows, possibly from another stream, so that new tasks run.
    end_failure(stream);
    order_after_host(*task);
    stream.queue.push_back(std::move(task));
    stream.submitters.push_back(host_thread());
    ++stream.submitted;
    wake_added(stream);
    return ACL_SUCCESS;
}

void end_failure(Stream& stream) {
    if (!stream.failure.reported()) return;
    if (!stream.failed_until) stream.failed_until = stream.submitted;
    if (stream.completed < stream.failed_until) return;
    stream.failure = {};
    stream.failed_until = 0;
}

int report(Stream& stream) {
    int code = ACL_SUCCESS;
    if (auto lost = stream.losses.find(host_thread()); lost != stream.losses.end()) {
        code = report(lost->second, true);
        stream.losses.erase(lost);
    }
    if (!code) code = report(stream.failure, false);
    end_failure(stream);
    return code;
}

std::string what_holds(const Stream& stream) {
    std::string next = stream.queue.empty() ? "none" : stream.queue.front()->name(), later;
    for (size_t i = 1; i < stream.queue.size() && i < 4; ++i) later += (i > 1 ? ", " : "") + stream.queue[i]->name();
    if (stream.queue.size() > 4) later += ", ...";
    return format("stream %d of device %d has %zu unfinished tasks; the next, ", stream.id, stream.device,
                  stream.queue.size()) +
           next +
           (stream.busy ? ", is running" : ", waits, possibly for an event or value that another stream has not recorded") +
           (later.empty() ? "" : "; after it: " + later);
}

int synchronize(Lock& lock, Stream& stream, int milliseconds) {
    if (int code = refuse_if_captured(stream, "aclrtSynchronizeStream")) return code;
    uint64_t target = stream.submitted;
    if (!wait_until(lock, [&] { return stream.completed >= target || stream.destroyed; }, milliseconds)) {
        DOCUMENTED("runtime: docs/zh/api_ref/06_stream_management.md (of a wait with a time limit)");
        return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT,
                    (milliseconds < 0 ? "the device is stalled: " : format("timeout after %d ms: ", milliseconds)) +
                        what_holds(stream));
    }
    host_acquires(stream);
    return report(stream);
}

int synchronize_device(int device, int milliseconds) {
    Lock lock(machine().mutex);
    std::vector<std::shared_ptr<Stream>> streams;
    for (auto& [handle, stream] : machine().streams.live) {
        if (stream->device == device) streams.push_back(stream);
    }
    int first = ACL_SUCCESS;
    for (auto& stream : streams) {
        if (stream->capture) {
            return fail(
                ACL_ERROR_RT_STREAM_CAPTURED,
                format("device %d must not be synchronized while its stream %d is captured", device, stream->id));
        }
    }
    for (auto& stream : streams) {
        int code = synchronize(lock, *stream, milliseconds);
        if (!first) first = code;
    }
    return first;
}

}  // namespace emulator

using namespace emulator;

extern "C" {

aclError aclrtCreateStream(aclrtStream* stream) { return create(stream, 0, 0); }
aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t priority, uint32_t flags) {
    return create(stream, priority, flags);
}
aclError aclrtDestroyStream(aclrtStream stream) { return destroy(stream, false); }
aclError aclrtDestroyStreamForce(aclrtStream stream) { return destroy(stream, true); }
aclError aclrtSynchronizeStream(aclrtStream stream) { return synchronize(stream, -1); }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t milliseconds) {
    return synchronize(stream, milliseconds);
}
aclError aclrtSynchronizeDevice() { return aclrtSynchronizeDeviceWithTimeout(-1); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t milliseconds) {
    if (int code = refuse_after_task_queue()) return code;
    return synchronize_device(current_device(), milliseconds);
}

aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
    Lock lock(machine().mutex);
    auto stream = find_stream(handle);
    if (!stream) return no_such_stream(handle);
    if (int code = refuse_if_captured(*stream, "aclrtStreamQuery")) return code;
    if (int code = refuse_after_task_queue()) return code;
    poll(lock);
    if (stream->queue.empty()) host_acquires(*stream);
    *status = stream->queue.empty() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
    return stream->queue.empty() ? report(*stream) : ACL_SUCCESS;
}

aclError aclrtStreamGetId(aclrtStream handle, int32_t* id) {
    return with_stream(handle, [&](Stream& stream) {
        *id = stream.id;
        return ACL_SUCCESS;
    });
}

aclError aclrtSetStreamFailureMode(aclrtStream handle, uint64_t mode) {
    return with_stream(handle, [&](Stream& stream) {
        stream.stop_on_failure = mode == ACL_STOP_ON_FAILURE;
        return ACL_SUCCESS;
    });
}

aclError aclrtSetStreamAttribute(aclrtStream handle, aclrtStreamAttr attribute, aclrtStreamAttrValue* value) {
    return with_stream(handle, [&](Stream& stream) {
        switch (attribute) {
            case ACL_STREAM_ATTR_FAILURE_MODE:
                stream.stop_on_failure = value->failureMode == ACL_STOP_ON_FAILURE;
                return int{ACL_SUCCESS};
            case ACL_STREAM_ATTR_PRIORITY:
                stream.priority = value->streamPriority;
                return int{ACL_SUCCESS};
            case ACL_STREAM_ATTR_FLOAT_OVERFLOW_CHECK:
                stream.overflow_switch = value->overflowSwitch;
                return int{ACL_SUCCESS};
            case ACL_STREAM_ATTR_USER_CUSTOM_TAG:  // for profilers, which are not emulated
            case ACL_STREAM_ATTR_CACHE_OP_INFO:
                return int{ACL_SUCCESS};
            default:
                return fail(ACL_ERROR_RT_PARAM_INVALID,
                            format("%d is not a value of aclrtStreamAttr", static_cast<int>(attribute)));
        }
    });
}

}  // extern "C"
