// What workers, the scheduler thread and waiting host threads share.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

#include "runtime/launch.h"
#include "runtime/scheduler.h"
#include "runtime/step.h"

namespace emulator {

using Clock = std::chrono::steady_clock;
// Threads spin first, because waking a sleeping thread takes a system call and tens of microseconds.
constexpr auto spin_time = std::chrono::microseconds(100);

// Guarded by the machine's lock.
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

Schedule& schedule();
uint64_t draw();  // a random number of the seed

// Has the scheduler thread look for tasks.
void notify_schedule();
void run_schedule();  // the scheduler thread
void work(std::shared_ptr<Stream> stream);  // a worker thread

// Completes the instant tasks of streams that wait, and wakes the workers of those that can then run. A worker is not
// woken for less, because that takes tens of microseconds.
void advance_blocked();
bool can_a_host_go_on();

// Appends the runnable steps of all streams. Returns whether a task waits for another process.
bool append_all_runnable(std::vector<Step>& steps);

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

}  // namespace emulator
