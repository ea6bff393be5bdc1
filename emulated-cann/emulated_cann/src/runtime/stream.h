// Streams: queues of tasks. Tasks of one stream run in order; streams run concurrently.
#pragma once

#include <atomic>
#include <deque>

#include "runtime/task.h"

namespace emulator {

struct Capture;
class Doorbell;

struct Stream {
    int id = 0;
    int device = 0;
    uint32_t priority = 0, flags = 0;
    bool stop_on_failure = false;
    uint32_t overflow_switch = 0;

    std::deque<TaskPointer> queue;
    uint64_t submitted = 0, completed = 0;  // numbers of tasks
    std::deque<uint64_t> submitters;        // the host thread of each task in the queue
    Failure failure;                        // kept until the host waits; applies to the tasks submitted until then
    uint64_t failed_until = 0;              // the number of tasks that the failure applies to, once it is reported
    std::map<uint64_t, Failure> losses;     // by host thread, the failure of its failed or skipped tasks
    bool busy = false;                      // whether a thread runs one of its tasks
    bool destroyed = false;

    std::condition_variable wake;
    std::atomic<uint64_t> signals{0};  // incremented when the worker must check the queue
    bool has_worker = false, sleeping = false, blocked = false;
    Doorbell* doorbell = nullptr;  // by which the worker sleeps, if a task waits for another process
    uint64_t ordinal = 0, ordinal_epoch = 0;  // the stream's number under the current schedule seed

    std::shared_ptr<Capture> capture;  // while it is captured
    size_t lane = 0;                   // in the captured graph
    std::shared_ptr<TaskGroup> group;  // while a task group is open
    std::shared_ptr<TaskGroup> updated_group;
    std::vector<TaskPointer> update;  // the new tasks of `updated_group`
    uint64_t update_began = 0;        // failures() at that time
    std::shared_ptr<Timeline> timeline;  // once races are looked for
};

// Returns the stream of a handle, the device's default stream for a null handle, or null for a stale handle. Requires
// the lock.
std::shared_ptr<Stream> find_stream(aclrtStream handle);
int no_such_stream(aclrtStream handle);

// Adds the task to the queue, to the captured graph, or to the task group being updated, by the stream's state.
// Requires the lock and does not release it.
int submit(Stream& stream, TaskPointer task);

// Blocks the host thread until `done` returns true. Returns false after `milliseconds`, or, if they are negative, when
// the machine is stalled: no task has run for the option `stall`, and none is runnable.
bool wait_until(Lock& lock, const std::function<bool()>& done, int milliseconds = -1);

// Describes the unfinished tasks of a stream, for the error of a wait that timed out.
std::string what_holds(const Stream& stream);

// Clears the stream's failure if it was reported and all tasks submitted until then are skipped. Requires the lock.
void end_failure(Stream& stream);
// Fails with a failure of the stream that the calling thread must be told. Requires the lock.
int report(Stream& stream);

// Waits for all tasks submitted so far, and reports their failure.
int synchronize(Lock& lock, Stream& stream, int milliseconds);
int synchronize_device(int device, int milliseconds);

void stop_workers();

}  // namespace emulator
