// Events shared between processes: created with ACL_EVENT_IPC, and opened by a handle in another process.
#pragma once

#include "runtime/event.h"

namespace emulator {

// Recordings in all processes are numbered from 1. A wait refers to the last recording before it was issued. Each of
// the last `slots` recordings has a slot, which holds its number once it is complete.
struct SharedMark {
    static constexpr size_t slots = 510;
    std::atomic<uint64_t> identity;  // equals that of the handle; detects a reused file descriptor
    std::atomic<uint64_t> recorded;
    std::atomic<uint64_t> reached[slots];

    bool is_reached(uint64_t recording) const { return reached[recording % slots] >= recording; }
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(SharedMark) == 4096);

// The memory of a shared event, mapped into this process.
struct SharedEvent {
    SharedEvent(int descriptor, SharedMark* mark) : descriptor(descriptor), mark(mark) {}
    SharedEvent(const SharedEvent&) = delete;
    ~SharedEvent();
    int descriptor;
    SharedMark* mark;
    Times times;  // what is ordered before a recording of this process
};

// Creates a shared event, or fails and returns null if the host has no memory for it.
std::shared_ptr<SharedEvent> new_shared_event();
// Requires the lock, as do the functions below. Must not be called in a capture.
int record_shared(const std::shared_ptr<SharedEvent>& shared, Stream& stream);
int wait_for_shared(const std::shared_ptr<SharedEvent>& shared, Stream& stream);
bool is_reached(const SharedEvent& shared);
int synchronize_shared(Lock& lock, const std::shared_ptr<SharedEvent>& shared);

}  // namespace emulator
