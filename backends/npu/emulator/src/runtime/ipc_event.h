// Events between processes: what ACL_EVENT_IPC makes, and what another process opens by a handle.
#pragma once

#include "runtime/event.h"

namespace emulator {

// Recordings count from 1 on, in whichever process. A wait is for the recording that was the last when it was issued.
// The last `slots` recordings each have a slot, which holds the number of a recording once that was reached.
struct SharedMark {
    static constexpr size_t slots = 510;
    std::atomic<uint64_t> identity;  // also in the handle, which another file must not pass for
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
};

// What an event with the flag ACL_EVENT_IPC needs; null, having failed, if the host has no memory for it.
std::shared_ptr<SharedEvent> new_shared_event();
// With the lock held, as for all that follows. Not in a capture.
int record_shared(const std::shared_ptr<SharedEvent>& shared, Stream& stream);
int wait_for_shared(const std::shared_ptr<SharedEvent>& shared, Stream& stream);
bool is_reached(const SharedEvent& shared);
int synchronize_shared(Lock& lock, const std::shared_ptr<SharedEvent>& shared);

}  // namespace emulator
