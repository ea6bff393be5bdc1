// Worker threads, one per stream, and the seeded scheduler thread that replaces them under a schedule seed.
// Under a seed, tasks start only when a host thread waits, which is as late as possible, and in an order that depends
// only on the seed. Lanes have random priorities that are redrawn after a random number of tasks, which produces both
// long runs of one lane and interleavings. For host threads that wait without CANN's functions, tasks also start after
// `idle_limit` without a submission.
#include "runtime/schedule.h"

namespace emulator {

namespace {

constexpr auto idle_limit = std::chrono::milliseconds(1000);
constexpr auto short_spin_time = std::chrono::microseconds(5);

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

void begin_thread(const char* name) {
    pthread_setname_np(pthread_self(), name);
    for (auto* function : schedule().at_start) function();
}

Spinner worker_spins;

// Sleeps until the doorbell rings. Meanwhile `place` holds it, so that other threads can ring it. Releases the lock.
void sleep_by(Doorbell*& place, Lock& lock, Doorbell& doorbell, uint32_t rings) {
    place = &doorbell;
    lock.unlock();
    doorbell.wait(rings);
    lock.lock();
    place = nullptr;
}

}  // namespace

Schedule& schedule() {
    static auto* only = new Schedule;
    return *only;
}

uint64_t draw() { return schedule().random = mix(schedule().random); }

bool append_all_runnable(std::vector<Step>& steps) {
    bool outside = false;
    for (auto& [handle, stream] : machine().streams.live) outside |= append_runnable(*stream, steps);
    return outside;
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

void on_worker_start(void (*function)()) { schedule().at_start.push_back(function); }

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

}  // namespace emulator
