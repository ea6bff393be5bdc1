// Worker threads, the seeded schedule, and waits of host threads.
#pragma once

#include "runtime/stream.h"

namespace emulator {

// Makes the stream's worker check its queue. Requires the lock.
void wake(Stream& stream);
// The same after a task was added to the queue. Completes an instant task at once if it can start.
void wake_added(Stream& stream);
// Makes workers check streams whose next task waits for another stream. Requires the lock.
void wake_blocked();
// Lets tasks run under a schedule seed while a host thread queries a stream or event, which would otherwise make no
// progress.
void poll(Lock& lock);
// Sets the schedule seed. With `seeded` false, every stream has its own worker; 0 is a valid seed.
void set_seed(bool seeded, uint64_t seed);

}  // namespace emulator
