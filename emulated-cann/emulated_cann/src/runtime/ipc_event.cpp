// Events shared between processes (ACL_EVENT_IPC). Each is stored in an anonymous file, which another process opens
// through /proc. The creator must be alive at that time. The kernel frees the file when all processes have ended.
#include "runtime/ipc_event.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <thread>
#include <utility>

#include "runtime/races.h"
#include "runtime/scheduler.h"

DOCUMENTED("runtime: docs/zh/api_ref/07_event_management.md; runtime: docs/zh/api_ref/25-01_aclError.md");

namespace emulator {

namespace {

struct Handle {
    uint64_t identity;
    int32_t process, descriptor;
};
static_assert(sizeof(Handle) <= sizeof(aclrtIpcEventHandle));

constexpr auto look_interval = std::chrono::microseconds(100);

struct Watched {
    std::shared_ptr<SharedEvent> shared;
    uint64_t recording;
};
struct Watch {  // guarded by the machine's lock
    std::vector<Watched> pending;
    std::condition_variable added;
    bool has_thread = false;
};
Watch& watch() {
    static auto* only = new Watch;
    return *only;
}

// Other processes cannot notify this one, so a thread polls while something waits for a shared event.
void poll_events() {
    pthread_setname_np(pthread_self(), "npu-ipc-events");
    auto& self = watch();
    while (true) {
        Lock lock(machine().mutex);
        self.added.wait(lock, [&] { return !self.pending.empty(); });
        if (std::erase_if(self.pending, [](auto& each) { return each.shared->mark->is_reached(each.recording); })) {
            wake_blocked();
            machine().progress.notify_all();
        }
        lock.unlock();
        std::this_thread::sleep_for(look_interval);
    }
}

void watch_for(const std::shared_ptr<SharedEvent>& shared, uint64_t recording) {
    watch().pending.push_back({shared, recording});
    if (!std::exchange(watch().has_thread, true)) std::thread(poll_events).detach();
    watch().added.notify_one();
}

struct IpcRecordTask : Task {
    std::shared_ptr<SharedEvent> shared;
    uint64_t recording = 0;
    void finish(const Context& context) override {
        release_to(shared->times, context);
        auto& slot = shared->mark->reached[recording % SharedMark::slots];
        uint64_t before = slot;
        while (before < recording && !slot.compare_exchange_weak(before, recording)) {
        }
    }
    bool is_instant() const override { return true; }
    std::string name() const override { return "EventRecord"; }
};

struct IpcWaitTask : Task {
    std::shared_ptr<SharedEvent> shared;
    uint64_t recording = 0;
    bool ready(const Context&) override { return shared->mark->is_reached(recording); }
    void finish(const Context& context) override { acquire_from(shared->times, context); }
    bool is_instant() const override { return true; }
    std::string name() const override { return "EventWait (ACL_EVENT_IPC)"; }
};

SharedMark* map(int descriptor) {
    void* address = mmap(nullptr, sizeof(SharedMark), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    return address == MAP_FAILED ? nullptr : static_cast<SharedMark*>(address);
}

std::shared_ptr<SharedEvent> open_shared_event(const Handle& handle) {
    auto path = format("/proc/%d/fd/%d", handle.process, handle.descriptor);
    int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
    struct stat status{};
    if (descriptor < 0) return nullptr;
    bool has_size = fstat(descriptor, &status) == 0 && status.st_size == sizeof(SharedMark);
    SharedMark* mark = has_size ? map(descriptor) : nullptr;
    if (!mark) {
        close(descriptor);
        return nullptr;
    }
    auto shared = std::make_shared<SharedEvent>(descriptor, mark);
    return mark->identity == handle.identity ? shared : nullptr;
}

}  // namespace

SharedEvent::~SharedEvent() {
    munmap(mark, sizeof(SharedMark));
    close(descriptor);
}

std::shared_ptr<SharedEvent> new_shared_event() {
    int descriptor = memfd_create("npu-event", MFD_CLOEXEC);
    SharedMark* mark = descriptor >= 0 && ftruncate(descriptor, sizeof(SharedMark)) == 0 ? map(descriptor) : nullptr;
    if (!mark) {
        if (descriptor >= 0) close(descriptor);
        OURS("a limit of the host machine");
        fail(ACL_ERROR_RT_MEMORY_ALLOCATION,
             "the host has no memory or file descriptor left for an event with ACL_EVENT_IPC");
        return nullptr;
    }
    std::random_device random;
    mark->identity = uint64_t{random()} << 32 | random();
    return std::make_shared<SharedEvent>(descriptor, mark);
}

int record_shared(const std::shared_ptr<SharedEvent>& shared, Stream& stream) {
    auto task = std::make_shared<IpcRecordTask>();
    task->shared = shared;
    task->recording = ++shared->mark->recorded;
    return submit(stream, task);
}

int wait_for_shared(const std::shared_ptr<SharedEvent>& shared, Stream& stream) {
    if (is_reached(*shared) && !finding_races()) return ACL_SUCCESS;
    auto task = std::make_shared<IpcWaitTask>();
    task->shared = shared;
    task->recording = shared->mark->recorded;
    watch_for(shared, task->recording);
    return submit(stream, task);
}

bool is_reached(const SharedEvent& shared) { return shared.mark->is_reached(shared.mark->recorded); }

int synchronize_shared(Lock& lock, const std::shared_ptr<SharedEvent>& shared) {
    uint64_t recording = shared->mark->recorded;
    if (!shared->mark->is_reached(recording)) watch_for(shared, recording);
    if (wait_until(lock, [&] { return shared->mark->is_reached(recording); })) {
        host_acquires(shared->times);
        return ACL_SUCCESS;
    }
    UNDEFINED("on hardware the host would wait indefinitely");
    return fail(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT,
                "the device is stalled, and the event is not complete in the process that recorded it");
}

}  // namespace emulator

using namespace emulator;

extern "C" {

aclError aclrtIpcGetEventHandle(aclrtEvent event_handle, aclrtIpcEventHandle* result) {
    Lock lock(machine().mutex);
    auto event = machine().events.find(event_handle);
    if (!event) return no_such_event(event_handle);
    if (!event->shared) {
        return fail(ACL_ERROR_RT_PARAM_INVALID,
                    "aclrtIpcGetEventHandle requires an event with the flag ACL_EVENT_IPC, which "
                    "torch.npu.Event(interprocess=True) creates");
    }
    Handle handle{event->shared->mark->identity, getpid(), event->shared->descriptor};
    *result = {};
    std::memcpy(result, &handle, sizeof(handle));
    return ACL_SUCCESS;
}

aclError aclrtIpcOpenEventHandle(aclrtIpcEventHandle given, aclrtEvent* result) {
    Handle handle;
    std::memcpy(&handle, &given, sizeof(handle));
    auto shared = open_shared_event(handle);
    if (!shared) {
        return fail(ACL_ERROR_RT_PARAM_INVALID,
                    format("process %d has no event for this handle; it must be alive, belong to the same user, and "
                           "keep the event until the handle is opened",
                           handle.process));
    }
    Lock lock(machine().mutex);
    auto event = std::make_shared<Event>();
    event->flags = ACL_EVENT_IPC;
    event->device = current_device();
    event->shared = shared;
    *result = machine().events.add(event);
    return ACL_SUCCESS;
}

}  // extern "C"
