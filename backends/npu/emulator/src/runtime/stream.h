// A stream: a queue of tasks that run one after the other, beside those of other streams.
#pragma once

#include <atomic>
#include <deque>

#include "runtime/task.h"

namespace emulator {

struct Capture;

struct Stream {
    int id = 0;
    int device = 0;
    uint32_t priority = 0, flags = 0;
    bool stop_on_failure = false;
    uint32_t overflow_switch = 0;

    std::deque<TaskPointer> queue;
    uint64_t submitted = 0, completed = 0;  // tasks so far
    std::deque<uint64_t> submitters;        // the host thread of each task in the queue
    Failure failure;                        // kept until the host waits, for what was submitted by then
    uint64_t failed_until = 0;              // tasks that the failure is for, once a host thread knows of it
    std::map<uint64_t, Failure> losses;     // by host thread, what its tasks failed with or were left out for
    bool busy = false;                      // a thread runs one of its tasks
    bool destroyed = false;

    std::condition_variable wake;
    std::atomic<uint64_t> signals{0};  // grows whenever the worker should look again
    bool has_worker = false, sleeping = false, blocked = false;
    uint64_t ordinal = 0, ordinal_epoch = 0;  // its number under the current schedule seed

    std::shared_ptr<Capture> capture;  // while it is captured
    size_t lane = 0;                   // in the captured graph
    std::shared_ptr<TaskGroup> group;  // while a task group is open
    std::shared_ptr<TaskGroup> updated_group;
    std::vector<TaskPointer> update;  // what replaces the tasks of `updated_group`
    uint64_t update_began = 0;        // failures() then
};

// The stream of a handle, the device's default stream for null; null for a stale handle. With the lock held.
std::shared_ptr<Stream> find_stream(aclrtStream handle);
int no_such_stream(aclrtStream handle);

// Puts the task where the stream's state says: into its queue, the captured graph, or the group being updated. Drops
// the lock never. With the lock held.
int submit(Stream& stream, TaskPointer task);

// Lets the host wait until `done`, while the streams go on. False if `milliseconds` passed before, or, where these are
// negative, if the machine stands still: nothing has run for long, and what is left waits for a signal that does not
// come.
bool wait_until(Lock& lock, const std::function<bool()>& done, int milliseconds = -1);

// Why a stream does not get on, for the error of a wait that was given up.
std::string what_holds(const Stream& stream);

// Ends the stream's failure if the host knows of it and all that had been submitted by then was left out. With the lock
// held, as for the next.
void end_failure(Stream& stream);
// Fails if something went wrong on the stream that the calling thread has to know of.
int report(Stream& stream);

// Waits for everything submitted so far, and reports the failure that it met.
int synchronize(Lock& lock, Stream& stream, int milliseconds);
int synchronize_device(int device, int milliseconds);

void stop_workers();

}  // namespace emulator
