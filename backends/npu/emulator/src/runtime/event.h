// Events: marks in streams that other streams and the host wait for.
#pragma once

#include <chrono>

#include "runtime/stream.h"

namespace emulator {

// One recording. A wait is for the recording that was the last when the wait was issued, as in CUDA.
struct Mark {
    bool reached = false;
    std::chrono::steady_clock::time_point time;
    Failure failure;      // of the stream, when it was reached
    uint64_t thread = 0;  // that recorded it
};

struct SharedEvent;

struct Event {
    uint32_t flags = 0;
    int device = 0;
    std::shared_ptr<Mark> mark;  // null: never recorded
    bool is_set = false;         // of an external event: recorded since it was last reset
    // Where it was last recorded, if that was in a captured stream.
    bool captured = false;
    std::weak_ptr<Capture> capture;
    size_t edge = 0;
    std::shared_ptr<SharedEvent> shared;  // of an event between processes, which has nothing of the above

    bool external() const { return flags & ACL_EVENT_EXTERNAL; }
};

int no_such_event(aclrtEvent handle);

}  // namespace emulator
