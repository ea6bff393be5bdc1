// Workers, one per stream, and the seeded scheduler that takes their place under a schedule seed.
//
// Under a seed nothing runs while the host goes on: tasks start only when a host thread waits, so that work is as late
// as it may be, and then in an order that depends on the seed alone. Lanes have priorities that are drawn anew now and
// then, which gives long runs of one lane as well as interleavings. A host that waits by other means than CANN's gets
// its work after `idle_limit`.
#include "runtime/scheduler.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "runtime/graph.h"

namespace emulator {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto idle_limit = std::chrono::milliseconds(1000);
constexpr auto look_time = std::chrono::milliseconds(200);  // between looks at whether anything runs
// Who sleeps has to be woken by a system call, and takes tens of microseconds to come back.
constexpr auto spin_time = std::chrono::microseconds(100);

struct Step {
    Stream* stream;
    Replay* replay;  // null: the stream's own task
    size_t lane;
    TaskPointer task;
    uint64_t place;  // for the seeded order: the same in every run of a program
};

struct Schedule {
    bool seeded = false, stopping = false, has_thread = false;
    uint64_t run_length = 1;  // how long priorities last, on average
    uint64_t random = 0, weights = 0, epoch = 0, ordinals = 0;
    std::atomic<uint64_t> steps{0};
    std::vector<const std::function<bool()>*> demands;  // of waiting host threads
    Clock::time_point last_submission;
    std::condition_variable wake;
    std::vector<Stream*> blocked;
    int waiting_hosts = 0;
    std::vector<void (*)()> at_start;  // before any thread, so without the lock
};

Schedule& schedule() {
    static auto* only = new Schedule;
    return *only;
}

uint64_t mix(uint64_t x) {  // splitmix64
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}
uint64_t draw() { return schedule().random = mix(schedule().random); }

bool skipping(const Stream& stream, Replay* replay) {
    if (stream.failure && stream.stop_on_failure) return true;
    return replay && replay->root().failure;
}

// The steps that may be taken now in place of `self`: itself, or those of the graph it replays.
void collect(const Step& self, std::vector<Step>& steps) {
    Context context{*self.stream, self.replay};
    bool skip = skipping(*self.stream, self.replay);
    if (!skip && !self.task->ready(context)) return;
    Replay* child = skip ? nullptr : self.task->replay(context);
    if (!child || child->over()) {
        steps.push_back(self);
        return;
    }
    for (size_t lane = 0; lane < child->lanes.size(); ++lane) {
        size_t next = child->lanes[lane].next;
        auto& tasks = child->graph->lanes[lane].tasks;
        if (next < tasks.size()) collect({self.stream, child, lane, tasks[next], mix(self.place + lane + 1)}, steps);
    }
}

void collect(Stream& stream, std::vector<Step>& steps) {
    if (stream.busy || stream.queue.empty()) return;
    collect({&stream, nullptr, 0, stream.queue.front(), mix(stream.ordinal)}, steps);
}

void take(Lock& lock, Step& step) {
    Stream& stream = *step.stream;
    Context context{stream, step.replay};
    Failure failure;
    bool skip = skipping(stream, step.replay);
    stream.busy = true;
    lock.unlock();
    if (!skip) {
        try {
            step.task->run(context);
        } catch (const DeviceError& error) {
            failure = {error.code, error.what()};
        } catch (const std::exception& error) {
            failure = {ACL_ERROR_RT_AICORE_EXCEPTION, step.task->name() + ": " + error.what()};
        } catch (...) {
            failure = {ACL_ERROR_RT_AICORE_EXCEPTION, step.task->name() + " failed without saying why"};
        }
    }
    lock.lock();
    if (failure) {
        failure.reason = format("on stream %d of device %d: ", stream.id, stream.device) + failure.reason;
        failure.told = std::make_shared<std::set<uint64_t>>();
        Failure& kept = step.replay ? step.replay->root().failure : stream.failure;
        if (!kept) kept = failure;
    }
    bool failed_before = bool(stream.failure) && !failure;
    step.task->finish(context);
    if (step.replay) {
        auto& lane = step.replay->lanes[step.lane];
        lane.child.reset();
        ++lane.next;
    } else {
        uint64_t thread = stream.submitters.front();
        if (thread && stream.failure && (skip || !failed_before)) stream.losses.insert_or_assign(thread, stream.failure);
        stream.queue.pop_front();
        stream.submitters.pop_front();
        ++stream.completed;
        end_failure(stream);
    }
    stream.busy = false;
    ++schedule().steps;
    wake_blocked();
    bool notify = schedule().waiting_hosts;
    lock.unlock();  // which whoever is woken will want
    if (notify) machine().progress.notify_all();
    step.task.reset();  // what a task held may take long to destroy
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

// Waits awake for a moment. One worker and one host thread at a time do: more would take the cores from those that have
// work. False if this one may not. Drops the lock meanwhile.
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

void work(std::shared_ptr<Stream> stream) {
    begin_thread(format("npu%d-stream%d", stream->device, stream->id).substr(0, 15).c_str());
    Lock lock(machine().mutex);
    std::vector<Step> steps;
    while (!stream->destroyed && !schedule().stopping) {
        steps.clear();
        if (!schedule().seeded) collect(*stream, steps);
        if (!steps.empty()) {
            take(lock, steps.front());
            continue;
        }
        if (!stream->queue.empty() && !stream->blocked) {
            stream->blocked = true;
            schedule().blocked.push_back(stream.get());
        }
        uint64_t seen = stream->signals;
        worker_spins.wait(lock, Clock::now() + spin_time, [&] { return stream->signals != seen; });
        stream->sleeping = true;
        stream->wake.wait(lock, [&] { return stream->signals != seen || stream->destroyed || schedule().stopping; });
        stream->sleeping = false;
    }
    std::erase(schedule().blocked, stream.get());
    stream->has_worker = false;
    // The stream dies with its last owner, which may be this thread: without the lock.
    lock.unlock();
}

void runnable_everywhere(std::vector<Step>& steps) {
    for (auto& [handle, stream] : machine().streams.live) collect(*stream, steps);
}

// A task could start now, and waits for a core only.
bool runnable() {
    std::vector<Step> steps;
    runnable_everywhere(steps);
    return !steps.empty();
}

void run_schedule() {
    begin_thread("npu-schedule");
    Lock lock(machine().mutex);
    std::vector<Step> steps;
    auto& self = schedule();
    while (!self.stopping) {
        bool wanted = std::any_of(self.demands.begin(), self.demands.end(), [](auto* done) { return !(*done)(); });
        bool idle = Clock::now() - self.last_submission > idle_limit;
        steps.clear();
        if (self.seeded && (wanted || idle)) runnable_everywhere(steps);
        if (steps.empty()) {
            self.wake.wait_for(lock, idle_limit);
            continue;
        }
        if (draw() % self.run_length == 0) self.weights = draw();
        auto first = std::max_element(steps.begin(), steps.end(), [&](auto& a, auto& b) {
            return mix(a.place ^ self.weights) < mix(b.place ^ self.weights);
        });
        take(lock, *first);
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
        // Not before: a library that is loaded later may still have something to say in `on_worker_start`.
        if (!std::exchange(self.has_thread, true)) std::thread(run_schedule).detach();
        if (self.waiting_hosts) self.wake.notify_one();
        return;
    }
    if (!stream.has_worker) {
        stream.has_worker = true;
        std::thread(work, find_stream(&stream)).detach();
    }
    ++stream.signals;
    if (stream.sleeping) stream.wake.notify_one();
}

void wake_blocked() {
    for (Stream* stream : schedule().blocked) {
        stream->blocked = false;
        ++stream->signals;
        if (stream->sleeping) stream->wake.notify_one();
    }
    schedule().blocked.clear();
    if (schedule().seeded && schedule().waiting_hosts) schedule().wake.notify_one();
}

bool wait_until(Lock& lock, const std::function<bool()>& done, int milliseconds) {
    if (done()) return true;
    auto& self = schedule();
    auto over = [&] { return done() || self.stopping; };  // nothing runs once the process ends
    auto deadline = Clock::now() + std::chrono::milliseconds(milliseconds);
    self.demands.push_back(&done);
    ++self.waiting_hosts;
    self.wake.notify_one();
    if (!self.seeded) {
        auto end = Clock::now() + spin_time;
        while (!over() && Clock::now() < end) {
            uint64_t seen = self.steps;
            if (!host_spins.wait(lock, end, [&] { return self.steps != seen; })) break;
        }
    }
    bool reached = true;
    if (milliseconds < 0) {
        uint64_t steps = self.steps;
        auto idle = look_time.zero();  // in looks, not by the clock: that goes on while this process gets no core
        while (!machine().progress.wait_for(lock, look_time, over)) {
            if (self.steps != steps || busy() || runnable()) {
                steps = self.steps;
                idle = look_time.zero();
            } else if ((idle += look_time) > std::chrono::seconds(machine().options.stall)) {
                reached = false;
                break;
            }
        }
    } else {
        reached = machine().progress.wait_until(lock, deadline, over);
    }
    --self.waiting_hosts;
    self.demands.erase(std::find(self.demands.begin(), self.demands.end(), &done));
    return reached;
}

void poll(Lock& lock) {
    auto& self = schedule();
    if (!self.seeded) return;
    uint64_t target = self.steps + draw() % 4;
    wait_until(lock, [&] {
        if (self.steps >= target) return true;
        return !runnable() && !busy();
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
    self.wake.notify_one();
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
