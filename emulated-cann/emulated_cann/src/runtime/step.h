// Steps, the tasks of streams and replays that can run now.
#pragma once

#include <vector>

#include "runtime/graph.h"

namespace emulator {

struct Step {
    Stream* stream;
    Replay* replay;  // null for the stream's own task
    size_t lane;
    TaskPointer task;
    uint64_t order;  // for the seeded order; the same in every run of a program
};

// splitmix64
uint64_t mix(uint64_t x);

// Appends the stream's runnable steps. Returns whether a task of the stream waits for another process. Requires the lock.
bool append_runnable(Stream& stream, std::vector<Step>& steps);

// Completes the stream's instant tasks up to the first other step, or the first that must wait. Returns their number.
// `steps` then has the stream's runnable steps. Requires the lock.
size_t complete_instants(Stream& stream, std::vector<Step>& steps);

// Runs a step, and records its completion or failure. Requires the lock. Releases it while a task runs that is not
// instant.
void run_step(Lock& lock, Step& step);

}  // namespace emulator
