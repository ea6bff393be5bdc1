// Which task runs next, and who runs it.
#pragma once

#include "runtime/stream.h"

namespace emulator {

// Looks for a runnable task of the stream, after something was submitted to it. With the lock held.
void wake(Stream& stream);
// Lets streams look again whose next task waits for something outside the stream.
void wake_blocked();
// A host thread asks how far a stream or event got: under a schedule seed that, too, must let work go on.
void poll(Lock& lock);
// No seed (0 is a seed too): every stream has its own worker.
void set_seed(bool seeded, uint64_t seed);

}  // namespace emulator
