// Events, which streams record and other streams and the host wait for.
#pragma once

#include <chrono>

#include "runtime/stream.h"

namespace emulator {

// One recording of an event. A wait refers to the last recording before the wait was issued, as in CUDA.
struct Mark {
    bool reached = false;
    std::chrono::steady_clock::time_point time;
    Failure failure;      // of the stream at the recording
    uint64_t thread = 0;  // the host thread that issued the recording
    Times times;          // what is ordered before it
};

struct SharedEvent;

struct Event {
    uint32_t flags = 0;
    int device = 0;
    std::shared_ptr<Mark> mark;  // null: never recorded
    bool is_set = false;         // of an external event: whether it was recorded since the last reset
    Times times;                 // of an external event: what is ordered before a recording of it
    // The last recording, if it was in a captured stream.
    bool captured = false;
    std::weak_ptr<Capture> capture;
    size_t edge = 0;
    std::shared_ptr<SharedEvent> shared;  // of an event with ACL_EVENT_IPC, which uses none of the above

    bool external() const { return flags & ACL_EVENT_EXTERNAL; }
};

int no_such_event(aclrtEvent handle);

}  // namespace emulator
