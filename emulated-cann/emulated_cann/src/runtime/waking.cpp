// What wakes workers and the scheduler thread. A thread is not woken unless it can go on, because that takes a system call
// and tens of microseconds. Tasks that only order others are completed by the thread that makes them ready.
#include <utility>

#include "runtime/schedule.h"

namespace emulator {

namespace {

// Has the stream's worker look at its queue.
void signal(Stream& stream) {
    ++stream.signals;
    if (stream.doorbell) return stream.doorbell->ring();
    if (stream.sleeping) stream.wake.notify_one();
}

}  // namespace

void notify_schedule() {
    auto& self = schedule();
    if (self.sleeps_by) return self.sleeps_by->ring();
    self.wake.notify_one();
}

bool can_a_host_go_on() {
    auto& awaited = schedule().awaited;
    return std::any_of(awaited.begin(), awaited.end(), [](auto* done) { return (*done)(); });
}

void advance_blocked() {
    auto& self = schedule();
    std::vector<Step> steps;
    for (bool changed = true; std::exchange(changed, false);) {
        std::erase_if(self.blocked, [&](Stream* stream) {
            size_t count = complete_instants(*stream, steps);
            self.steps += count;
            changed |= count > 0;
            if (steps.empty()) return false;
            stream->blocked = false;
            signal(*stream);
            return true;
        });
    }
}

void wake(Stream& stream) {
    auto& self = schedule();
    if (self.seeded) {
        self.last_submission = Clock::now();
        if (stream.ordinal_epoch != self.epoch) {
            stream.ordinal_epoch = self.epoch;
            stream.ordinal = ++self.ordinals;
        }
        // Starts the thread at the first submission, because libraries that are loaded later still call
        // `on_worker_start`.
        if (!std::exchange(self.has_thread, true)) std::thread(run_schedule).detach();
        if (self.waiting_hosts) notify_schedule();
        return;
    }
    if (!stream.has_worker) {
        stream.has_worker = true;
        std::thread(work, find_stream(&stream)).detach();
    }
    signal(stream);
}

void wake_added(Stream& stream) {
    auto& self = schedule();
    if (!self.seeded) {
        if (stream.queue.size() > 1) return;  // the worker knows of the first, and goes on with the others
        std::vector<Step> steps;
        if (stream.queue.front()->is_instant() && complete_instants(stream, steps)) {
            ++self.steps;
            wake_blocked();
            if (stream.queue.empty()) return;
        }
    }
    wake(stream);
}

void wake_blocked() {
    auto& self = schedule();
    if (self.seeded) {
        if (self.waiting_hosts) notify_schedule();
        return;
    }
    advance_blocked();
    if (can_a_host_go_on()) machine().progress.notify_all();
}

void set_doorbell(std::weak_ptr<Doorbell> doorbell) {
    Lock lock(machine().mutex);
    schedule().doorbell = std::move(doorbell);
}

void look_again() {
    Lock lock(machine().mutex);
    wake_blocked();
    if (schedule().seeded) notify_schedule();
}

}  // namespace emulator
