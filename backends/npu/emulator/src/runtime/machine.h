// The emulated machine: its devices, its streams, and the one lock over all of them.
//
// Everything that schedules (queues, events, captures, graphs) is guarded by `machine().mutex`; the work of a task runs
// without it. One lock costs little: it is held for a fraction of a microsecond per launch.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/errors.h"

namespace emulator {

struct Stream;
struct Event;
struct Graph;
struct TaskGroup;
using Lock = std::unique_lock<std::mutex>;

// Set by `hal_emulator_set` before the first device is used; see control.h.
struct Options {
    int64_t devices = 1;
    int64_t memory = int64_t{16} << 30;  // bytes of each device
    int64_t streams = 2048;              // of each device, those that captured graphs hold included
    int64_t tasks = int64_t{1} << 20;    // of each device, in captured graphs
    int64_t stall = 30;                  // seconds in which nothing runs, after which a wait of the host is given up
    std::string soc = "Ascend910B3";
    std::string version = "9.1.0";  // of CANN
};

struct Device {
    int index = 0;
    Stream* default_stream = nullptr;             // what a null aclrtStream stands for; made on first use
    std::atomic<int64_t> streams = 0, tasks = 0;  // in use
    bool active = false;
};

// Handles given to the caller, so that a stale one is refused rather than followed.
template <class T>
struct Handles {
    std::map<void*, std::shared_ptr<T>> live;
    void* add(std::shared_ptr<T> object) {
        void* handle = object.get();
        live.emplace(handle, std::move(object));
        return handle;
    }
    std::shared_ptr<T> find(void* handle) const {
        auto found = live.find(handle);
        return found == live.end() ? nullptr : found->second;
    }
    bool remove(void* handle) { return live.erase(handle) != 0; }
};

struct Machine {
    std::mutex mutex;
    std::condition_variable progress;  // a task ended, or a host thread must look again
    Options options;
    std::deque<Device> devices;
    Handles<Stream> streams;
    Handles<Event> events;
    Handles<Graph> graphs;
    Handles<TaskGroup> groups;
};

// Never destroyed: workers and torch_npu's own threads outlive static destructors.
Machine& machine();

// The device of the calling thread; device 0 where none was set, as CANN's default-device setting has it.
int current_device();

// The device's record, made on first use. With the lock held.
Device& device_of(int index);

}  // namespace emulator
