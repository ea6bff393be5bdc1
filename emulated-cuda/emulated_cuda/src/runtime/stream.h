// Streams: queues of work, each in its order. Without a seed work runs as soon as it is queued; with one it runs late,
// a little at a time and from streams that are drawn, and whole only where something waits for it. So whatever a
// program forgot to wait for has not happened yet.
#pragma once

#include <cuda_runtime_api.h>

#include <deque>
#include <functional>
#include <memory>
#include <set>

#include "runtime/error.h"
#include "runtime/lock.h"
#include "runtime/options.h"

namespace emulated {

struct Capture;
struct Stream;
using Function = std::function<void()>;

// One recording of an event. Whoever waits for an event waits for its latest recording at that moment, whatever is
// recorded later.
struct Record {
    Stream* stream;
    bool done = false;
    double milliseconds = 0;  // when
};

// Something to run, or else something to wait for.
struct Work {
    Function run;
    std::shared_ptr<Record> wait;
};

struct Stream {
    int device = 0;
    unsigned flags = cudaStreamDefault;
    int priority = 0;
    std::deque<Work> queue;
    bool running = false;  // so that what runs, if it calls CUDA, does not overtake itself

    Capture* capture = nullptr;
    std::set<int> tail;  // the capture's nodes that the next one depends on

    // Whether it and the legacy stream wait for each other.
    bool blocking() const { return !(flags & cudaStreamNonBlocking); }
};

int& current_device();
std::set<Stream*>& streams();

// The stream of a handle; of none, of cudaStreamLegacy and cudaStreamPerThread the legacy one. Null if there is none.
Stream* find(cudaStream_t handle);
bool is_legacy(const Stream& stream);

// Puts work on a stream, or into the graph of its capture. `kind` is what the graph's listing calls it.
cudaError_t enqueue(Stream& stream, const char* kind, Function run);
void enqueue_wait(Stream& stream, std::shared_ptr<Record> record);

// Runs what is queued on a stream; until `record` is done, if one is given.
void drain(Stream& stream, const Record* record = nullptr);
void drain_device(int device);
void drain_everything();
// With a seed: lets some streams go on a little.
void go_on();

}  // namespace emulated
