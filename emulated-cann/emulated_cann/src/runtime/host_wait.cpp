// Waits of host threads for streams.
#include "runtime/schedule.h"

namespace emulator {

namespace {

constexpr auto check_interval = std::chrono::milliseconds(200);  // between checks for progress
Spinner host_spins;

bool busy() {
    auto& live = machine().streams.live;
    return std::any_of(live.begin(), live.end(), [](auto& each) { return each.second->busy; });
}

// Returns whether any task can start now.
bool any_runnable() {
    std::vector<Step> steps;
    append_all_runnable(steps);
    return !steps.empty();
}

// Returns whether any task can start now, or will be able to, or will fail, because another process does something.
bool any_progress() {
    std::vector<Step> steps;
    return append_all_runnable(steps) || !steps.empty();
}

}  // namespace

bool wait_until(Lock& lock, const std::function<bool()>& done, int milliseconds) {
    if (done()) return true;
    auto& self = schedule();
    auto finished = [&] { return done() || self.stopping; };  // no task runs after stop_workers
    auto deadline = Clock::now() + std::chrono::milliseconds(milliseconds);
    self.awaited.push_back(&done);
    ++self.waiting_hosts;
    if (self.seeded) notify_schedule();
    if (!self.seeded) {
        auto end = Clock::now() + spin_time;
        while (!finished() && Clock::now() < end) {
            uint64_t seen = self.steps;
            if (!host_spins.wait(lock, end, [&] { return self.steps != seen; })) break;
        }
    }
    bool reached = true;
    if (milliseconds < 0) {
        uint64_t steps = self.steps;
        auto idle =
            check_interval.zero();  // counts intervals, because the clock advances while the process is not scheduled
        while (!machine().progress.wait_for(lock, check_interval, finished)) {
            if (self.steps != steps || busy() || any_progress()) {
                steps = self.steps;
                idle = check_interval.zero();
            } else if ((idle += check_interval) > std::chrono::seconds(machine().options.stall)) {
                reached = false;
                break;
            }
        }
    } else {
        reached = machine().progress.wait_until(lock, deadline, finished);
    }
    --self.waiting_hosts;
    self.awaited.erase(std::find(self.awaited.begin(), self.awaited.end(), &done));
    return reached;
}

void poll(Lock& lock) {
    auto& self = schedule();
    if (!self.seeded) return;
    uint64_t target = self.steps + draw() % 4;
    wait_until(lock, [&] {
        if (self.steps >= target) return true;
        return !any_runnable() && !busy();
    });
}

void stop_workers() {
    Lock lock(machine().mutex);
    wait_until(
        lock,
        [] {
            return std::all_of(machine().streams.live.begin(), machine().streams.live.end(),
                               [](auto& each) { return each.second->queue.empty(); });
        },
        2000);
    schedule().stopping = true;
    machine().progress.notify_all();
    schedule().wake.notify_all();
    for (auto& [handle, stream] : machine().streams.live) stream->wake.notify_all();
}

}  // namespace emulator
