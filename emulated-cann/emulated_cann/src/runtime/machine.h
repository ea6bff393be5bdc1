// The emulated machine: its devices, its streams, and the lock that guards them.
// `machine().mutex` guards all scheduling state (queues, events, captures, graphs). Tasks run without it. One lock
// suffices, because a launch holds it for a fraction of a microsecond.
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

// Those of Ascend910B3.
constexpr uint32_t cube_cores = 24, vector_cores = 48;

struct Stream;
struct Event;
struct Graph;
struct TaskGroup;
using Lock = std::unique_lock<std::mutex>;

// Set by `emulated_cann_set` before the first device is used; see control.h.
struct Options {
    int64_t devices = 1;
    int64_t memory = int64_t{16} << 30;  // bytes per device
    int64_t streams = 2048;              // per device, including those that captured graphs hold
    int64_t tasks = int64_t{1} << 20;    // per device, in captured graphs
    int64_t stall = 30;                  // seconds without progress after which a wait of the host fails
    std::string soc = "Ascend910B3";
    std::string version = "9.1.0";  // of CANN
};

struct Device {
    int index = 0;
    Stream* default_stream = nullptr;             // the stream of a null aclrtStream; created on first use
    std::atomic<int64_t> streams = 0, tasks = 0;  // in use
    bool active = false;
};

// Live handles, so that stale ones are refused instead of dereferenced.
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
    std::condition_variable progress;  // notified when a task ends or a host thread must check its condition
    Options options;
    std::deque<Device> devices;
    Handles<Stream> streams;
    Handles<Event> events;
    Handles<Graph> graphs;
    Handles<TaskGroup> groups;
};

// Never destroyed, because workers and torch_npu's threads outlive static destructors.
Machine& machine();

// Returns the device of the calling thread, or device 0 if it has set none, CANN's default device.
int current_device();

// Returns the device's record, created on first use. Requires the lock.
Device& device_of(int index);

}  // namespace emulator
