// Events. An event with ACL_EVENT_EXTERNAL is a flag: a wait may be issued before the record, inside or outside a
// graph, aclrtResetEvent clears it, and it does not propagate failures. All other events follow CUDA: a wait for an
// event that was never recorded has no effect. They propagate the failure of the recording stream to the waiting
// streams.
#include "runtime/event.h"

#include <utility>

#include "runtime/capture.h"
#include "runtime/ipc_event.h"
#include "runtime/races.h"
#include "runtime/scheduler.h"

DOCUMENTED("runtime: docs/zh/api_ref/07_event_management.md; runtime: docs/zh/api_ref/25-01_aclError.md");

namespace emulator {

namespace {

// Makes the waiting stream fail too, because its inputs were not computed, unless the failure was reported already.
void propagate_failure(const Failure& failure, const Context& context) {
    if (failure && !failure.reported() && !context.stream.failure) context.stream.failure = failure;
}

// Appends the address of an event, because external events have no number.
std::string numbered(const char* type, const Event* event) {
    return format("%s_%ju", type, reinterpret_cast<uintmax_t>(event));
}

struct RecordTask : Task {
    std::shared_ptr<Event> event;
    std::shared_ptr<Mark> mark;  // null for an external event
    void finish(const Context& context) override {
        release_to(mark ? mark->times : event->times, context);
        if (!mark) {
            event->is_set = true;
            return;
        }
        mark->time = std::chrono::steady_clock::now();
        mark->failure = context.stream.failure;
        mark->reached = true;
    }
    bool is_instant() const override { return true; }
    std::string name() const override { return "EventRecord"; }
    std::vector<Dumped> dumped() const override { return {{numbered("EVENT_RECORD", event.get()), "EVENT_RECORD"}}; }
};

struct WaitTask : Task {
    std::shared_ptr<Event> event;
    std::shared_ptr<Mark> mark;
    bool ready(const Context&) override { return mark ? mark->reached : event->is_set; }
    void finish(const Context& context) override {
        acquire_from(mark ? mark->times : event->times, context);
        if (mark) propagate_failure(mark->failure, context);
    }
    bool is_instant() const override { return true; }
    std::string name() const override { return "EventWait"; }
    std::vector<Dumped> dumped() const override { return {{numbered("EVENT_WAIT", event.get()), "EVENT_WAIT"}}; }
};

struct ResetTask : Task {
    std::shared_ptr<Event> event;
    void finish(const Context&) override { event->is_set = false; }
    bool is_instant() const override { return true; }
    std::string name() const override { return "EventReset"; }
    std::vector<Dumped> dumped() const override { return {{numbered("EVENT_RESET", event.get()), "EVENT_RESET"}}; }
};

int create(aclrtEvent* handle, uint32_t flags) {
    if (flags & ACL_EVENT_IPC && flags != ACL_EVENT_IPC) {
        return fail(ACL_ERROR_RT_PARAM_INVALID,
                    format("ACL_EVENT_IPC must not be combined with other flags, but flags are 0x%x", flags));
    }
    Lock lock(machine().mutex);
    auto event = std::make_shared<Event>();
    if (flags & ACL_EVENT_IPC && !(event->shared = new_shared_event())) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    event->flags = flags;
    event->device = current_device();
    *handle = machine().events.add(event);
    return ACL_SUCCESS;
}

// Refuses a call that CANN supports only for events of one process.
int refuse_if_shared(const Event& event, const char* function) {
    if (!event.shared) return ACL_SUCCESS;
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, format("%s does not support events with ACL_EVENT_IPC", function));
}

int refuse_if_captured(Event& event, const char* action) {
    if (!event.captured) return ACL_SUCCESS;
    return fail(
        ACL_ERROR_RT_EVENT_CAPTURED,
        format("%s is not allowed, because the event was last recorded in a captured stream and has no state", action));
}

using Act = std::function<int(const std::shared_ptr<Event>&, Stream&)>;
int with_both(aclrtEvent event_handle, aclrtStream stream_handle, const Act& act) {
    Lock lock(machine().mutex);
    auto event = machine().events.find(event_handle);
    if (!event) return no_such_event(event_handle);
    auto stream = find_stream(stream_handle);
    if (!stream) return no_such_stream(stream_handle);
    return act(event, *stream);
}

double milliseconds(const Mark& mark) {
    return std::chrono::duration<double, std::milli>(mark.time.time_since_epoch()).count();
}

int not_reached(const Event& event) {
    if (!event.mark)
        return fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "the event was never recorded; call aclrtRecordEvent first");
    return fail(ACL_ERROR_RT_EVENT_NOT_COMPLETE, "the event is not complete; call aclrtSynchronizeEvent first");
}

}  // namespace

int no_such_event(aclrtEvent handle) {
    return fail(ACL_ERROR_RT_INVALID_HANDLE, format("%p is not a live event", handle));
}

}  // namespace emulator

using namespace emulator;

extern "C" {

aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flags) { return create(event, flags); }
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flags) { return create(event, flags); }

aclError aclrtDestroyEvent(aclrtEvent handle) {
    Lock lock(machine().mutex);
    return machine().events.remove(handle) ? ACL_SUCCESS : no_such_event(handle);
}

aclError aclrtRecordEvent(aclrtEvent event_handle, aclrtStream stream_handle) {
    return with_both(event_handle, stream_handle, [](const std::shared_ptr<Event>& event, Stream& stream) {
        if (event->shared && stream.capture) return refuse_if_shared(*event, "aclrtRecordEvent in a capture");
        if (event->shared) return record_shared(event->shared, stream);
        auto task = std::make_shared<RecordTask>();
        task->event = event;
        if (event->external()) return submit(stream, task);
        if (stream.capture) return record_edge(stream, event);
        task->mark = std::make_shared<Mark>();
        task->mark->thread = host_thread();
        int code = submit(stream, task);
        if (code) return code;
        event->mark = task->mark;
        event->captured = false;
        event->capture.reset();
        return ACL_SUCCESS;
    });
}

aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent event_handle) {
    return with_both(event_handle, stream_handle, [](const std::shared_ptr<Event>& event, Stream& stream) {
        if (event->shared && stream.capture) return refuse_if_shared(*event, "aclrtStreamWaitEvent in a capture");
        if (event->shared) return wait_for_shared(event->shared, stream);
        auto task = std::make_shared<WaitTask>();
        task->event = event;
        if (event->external()) return submit(stream, task);
        if (event->captured) {
            auto capture = event->capture.lock();
            if (capture) return join(stream, capture, event->edge);
            return fail(ACL_ERROR_RT_EVENT_CAPTURED,
                        "the event was last recorded in a capture that has ended; record it again");
        }
        if (stream.capture && event->mark) {
            return fail(ACL_ERROR_RT_CAPTURE_DEPENDENCY,
                        format("stream %d is captured and must not wait for an event that was recorded outside the "
                               "capture; record it in a captured stream, or create it with ACL_EVENT_EXTERNAL",
                               stream.id));
        }
        bool is_over = event->mark && event->mark->reached && !event->mark->failure;
        if (!event->mark || (is_over && !finding_races())) return int{ACL_SUCCESS};
        task->mark = event->mark;
        return submit(stream, task);
    });
}

aclError aclrtResetEvent(aclrtEvent event_handle, aclrtStream stream_handle) {
    return with_both(event_handle, stream_handle, [](const std::shared_ptr<Event>& event, Stream& stream) {
        if (int code = refuse_if_shared(*event, "aclrtResetEvent")) return code;
        // Other events need no reset, because each record replaces the earlier one.
        if (!event->external()) return int{ACL_SUCCESS};
        auto task = std::make_shared<ResetTask>();
        task->event = event;
        return submit(stream, task);
    });
}

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
    Lock lock(machine().mutex);
    auto event = machine().events.find(handle);
    if (!event) return no_such_event(handle);
    if (int code = refuse_if_captured(*event, "aclrtQueryEventStatus")) return code;
    if (int code = refuse_after_task_queue()) return code;
    auto is_over = [&] { return event->shared ? is_reached(*event->shared) : !event->mark || event->mark->reached; };
    bool reached = is_over();
    if (!reached) {
        poll(lock);
        reached = is_over();
    }
    if (reached) host_acquires(event->shared ? event->shared->times : event->mark ? event->mark->times : Times());
    *status = reached ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus* status) {
    {
        Lock lock(machine().mutex);
        auto event = machine().events.find(handle);
        if (!event) return no_such_event(handle);
        if (int code = refuse_if_shared(*event, "aclrtQueryEventWaitStatus")) return code;
    }
    aclrtEventRecordedStatus recorded;
    int code = aclrtQueryEventStatus(handle, &recorded);
    if (code == ACL_SUCCESS) {
        *status = recorded == ACL_EVENT_RECORDED_STATUS_COMPLETE ? ACL_EVENT_WAIT_STATUS_COMPLETE
                                                                 : ACL_EVENT_WAIT_STATUS_NOT_READY;
    }
    return code;
}

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
    Lock lock(machine().mutex);
    auto event = machine().events.find(handle);
    if (!event) return no_such_event(handle);
    if (int code = refuse_if_captured(*event, "aclrtSynchronizeEvent")) return code;
    if (int code = refuse_after_task_queue()) return code;
    if (event->shared) return synchronize_shared(lock, event->shared);
    auto mark = event->mark;
    if (!mark) return ACL_SUCCESS;
    if (!wait_until(lock, [&] { return mark->reached; })) {
        UNDEFINED("on hardware the host would wait indefinitely");
        return fail(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, "the device is stalled, and the event is not complete");
    }
    host_acquires(mark->times);
    return report(mark->failure, mark->thread == host_thread());
}

aclError aclrtEventElapsedTime(float* elapsed, aclrtEvent start_handle, aclrtEvent end_handle) {
    Lock lock(machine().mutex);
    auto start = machine().events.find(start_handle), end = machine().events.find(end_handle);
    if (!start || !end) return no_such_event(start ? end_handle : start_handle);
    for (auto& each : {start, end}) {
        if (int code = refuse_if_shared(*each, "aclrtEventElapsedTime")) return code;
    }
    if (!start->mark || !start->mark->reached) return not_reached(*start);
    if (!end->mark || !end->mark->reached) return not_reached(*end);
    *elapsed = static_cast<float>(milliseconds(*end->mark) - milliseconds(*start->mark));
    return ACL_SUCCESS;
}

aclError aclrtEventGetTimestamp(aclrtEvent handle, uint64_t* timestamp) {
    Lock lock(machine().mutex);
    auto event = machine().events.find(handle);
    if (!event) return no_such_event(handle);
    if (int code = refuse_if_shared(*event, "aclrtEventGetTimestamp")) return code;
    if (!event->mark || !event->mark->reached) return not_reached(*event);
    *timestamp = static_cast<uint64_t>(milliseconds(*event->mark) * 1000);
    return ACL_SUCCESS;
}

}  // extern "C"
