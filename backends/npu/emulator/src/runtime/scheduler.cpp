// Worker threads, one per stream, and the seeded scheduler thread that replaces them under a schedule seed.
// Under a seed, tasks start only when a host thread waits, which is as late as possible, and in an order that depends
// only on the seed. Lanes have random priorities that are redrawn after a random number of tasks, which produces both
// long runs of one lane and interleavings. For host threads that wait without CANN's functions, tasks also start after
// `idle_limit` without a submission.
#include "runtime/scheduler.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "runtime/launch.h"
#include "runtime/step.h"

namespace emulator {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto idle_limit = std::chrono::milliseconds(1000);
constexpr auto check_interval = std::chrono::milliseconds(200);  // between checks for progress
// Threads spin first, because waking a sleeping thread takes a system call and tens of microseconds.
constexpr auto spin_time = std::chrono::microseconds(100);

constexpr auto short_spin_time = std::chrono::microseconds(5);

struct Schedule {
    bool seeded = false, stopping = false, has_thread = false;
    uint64_t run_length = 1;  // the average number of tasks between changes of priorities
    uint64_t random = 0, weights = 0, epoch = 0, ordinals = 0;
    std::atomic<uint64_t> steps{0};
    std::vector<const std::function<bool()>*> awaited;  // conditions of waiting host threads
    Clock::time_point last_submission;
    std::condition_variable wake;
    std::vector<Stream*> blocked;
    int waiting_hosts = 0;
    std::weak_ptr<Doorbell> doorbell;  // see set_doorbell
    Doorbell* sleeps_by = nullptr;     // by which the scheduler thread sleeps
    std::vector<void (*)()> at_start;  // not guarded: complete before the first thread starts
};

Schedule& schedule() {
    static auto* only = new Schedule;
    return *only;
}

uint64_t draw() { return schedule().random = mix(schedule().random); }

// Has the scheduler thread look for tasks.
void notify_schedule() {
    auto& self = schedule();
    if (self.sleeps_by) return self.sleeps_by->ring();
    self.wake.notify_one();
}

// Has the stream's worker look at its queue.
void signal(Stream& stream) {
    ++stream.signals;
    if (stream.doorbell) return stream.doorbell->ring();
    if (stream.sleeping) stream.wake.notify_one();
}

bool can_a_host_go_on() {
    auto& awaited = schedule().awaited;
    return std::any_of(awaited.begin(), awaited.end(), [](auto* done) { return (*done)(); });
}

// Completes the instant tasks of streams that wait, and wakes the workers of those that can then run. A worker is not
// woken for less, because that takes tens of microseconds.
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

// Runs a step, and notifies the threads that may wait for its completion.
void run(Lock& lock, Step& step) {
    bool is_instant = step.task->is_instant();
    run_step(lock, step);
    ++schedule().steps;
    if (!schedule().seeded) advance_blocked();
    bool notify = can_a_host_go_on();
    if (is_instant && !notify) return;
    lock.unlock();  // the notified thread needs it
    if (notify) machine().progress.notify_all();
    step.task.reset();  // destroying a task may take long
    lock.lock();
}

bool busy() {
    auto& live = machine().streams.live;
    return std::any_of(live.begin(), live.end(), [](auto& each) { return each.second->busy; });
}

void begin_thread(const char* name) {
    pthread_setname_np(pthread_self(), name);
    for (auto* function : schedule().at_start) function();
}

// Waits briefly without sleeping. Only one worker and one host thread may spin at a time, because more would take cores
// from threads with work. Returns false if another thread spins already. Releases the lock meanwhile.
struct Spinner {
    std::atomic<bool> taken{false};
    template <class Done>
    bool wait(Lock& lock, Clock::time_point end, Done done) {
        if (taken.exchange(true)) return false;
        lock.unlock();
        while (!done() && Clock::now() < end) std::this_thread::yield();
        taken = false;
        lock.lock();
        return true;
    }
};
Spinner worker_spins, host_spins;

// Sleeps until the doorbell rings. Meanwhile `place` holds it, so that other threads can ring it. Releases the lock.
void sleep_by(Doorbell*& place, Lock& lock, Doorbell& doorbell, uint32_t rings) {
    place = &doorbell;
    lock.unlock();
    doorbell.wait(rings);
    lock.lock();
    place = nullptr;
}

void work(std::shared_ptr<Stream> stream) {
    begin_thread(format("npu%d-stream%d", stream->device, stream->id).substr(0, 15).c_str());
    Lock lock(machine().mutex);
    std::vector<Step> steps;
    while (!stream->destroyed && !schedule().stopping) {
        steps.clear();
        auto doorbell = schedule().doorbell.lock();
        uint32_t rings = doorbell ? doorbell->rings() : 0;  // before the tasks look at what other processes did
        bool outside = !schedule().seeded && append_runnable(*stream, steps);
        if (!steps.empty()) {
            run(lock, steps.front());
            continue;
        }
        if (!stream->queue.empty() && !stream->blocked) {
            stream->blocked = true;
            schedule().blocked.push_back(stream.get());
        }
        if (!outside) doorbell.reset();
        uint64_t seen = stream->signals;
        auto signalled = [&] { return stream->signals != seen || (doorbell && doorbell->rings() != rings); };
        // While no host waits, the host is what others wait for: leave it the core.
        auto limit = outside && !schedule().waiting_hosts ? short_spin_time : spin_time;
        if (worker_spins.wait(lock, Clock::now() + limit, signalled) && signalled()) continue;
        if (doorbell) {
            sleep_by(stream->doorbell, lock, *doorbell, rings);
            continue;
        }
        stream->sleeping = true;
        stream->wake.wait(lock, [&] { return stream->signals != seen || stream->destroyed || schedule().stopping; });
        stream->sleeping = false;
    }
    std::erase(schedule().blocked, stream.get());
    stream->has_worker = false;
    // This thread may be the last owner, which destroys the stream without the lock.
    lock.unlock();
}

// Returns whether a task waits for another process.
bool append_all_runnable(std::vector<Step>& steps) {
    bool outside = false;
    for (auto& [handle, stream] : machine().streams.live) outside |= append_runnable(*stream, steps);
    return outside;
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

void run_schedule() {
    begin_thread("npu-schedule");
    Lock lock(machine().mutex);
    std::vector<Step> steps;
    auto& self = schedule();
    while (!self.stopping) {
        bool wanted = std::any_of(self.awaited.begin(), self.awaited.end(), [](auto* done) { return !(*done)(); });
        bool idle = Clock::now() - self.last_submission > idle_limit;
        steps.clear();
        auto doorbell = self.doorbell.lock();
        uint32_t rings = doorbell ? doorbell->rings() : 0;
        bool outside = self.seeded && (wanted || idle) && append_all_runnable(steps);
        if (steps.empty() && outside && doorbell) {
            auto rung = [&] { return doorbell->rings() != rings; };
            if (worker_spins.wait(lock, Clock::now() + spin_time, rung) && rung()) continue;
            sleep_by(self.sleeps_by, lock, *doorbell, rings);
            continue;
        }
        doorbell.reset();
        if (steps.empty()) {
            self.wake.wait_for(lock, idle_limit);
            continue;
        }
        if (draw() % self.run_length == 0) self.weights = draw();
        auto first = std::max_element(steps.begin(), steps.end(), [&](auto& a, auto& b) {
            return mix(a.order ^ self.weights) < mix(b.order ^ self.weights);
        });
        run(lock, *first);
    }
}

}  // namespace

void on_worker_start(void (*function)()) { schedule().at_start.push_back(function); }

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

void set_seed(bool seeded, uint64_t seed) {
    Lock lock(machine().mutex);
    auto& self = schedule();
    self.seeded = seeded;
    self.random = mix(seed);
    self.weights = draw();
    self.run_length = uint64_t{2} << draw() % 4;
    self.ordinals = 0;
    ++self.epoch;
    self.last_submission = Clock::now();
    for (auto& [handle, stream] : machine().streams.live) {
        if (!stream->queue.empty()) wake(*stream);
    }
    notify_schedule();
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
