// What Python asks of the runtime; see control.py. None of it is CANN's.
#pragma once

#include <cstdint>

extern "C" {

// Options, by name: "devices", "memory" (bytes of each device), "streams" and "tasks" (limits of each device),
// "stall" (seconds in which nothing runs, after which a wait of the host fails rather than lasts for ever), as
// decimal numbers; "soc" and "version" (of CANN) as text. Devices and memory only before the first use of a device.
// Returns 0, or -1 for a name or a value that is not known.
int hal_emulator_set(const char* name, const char* value);
// The value of one that is a number; -1 for another name.
int64_t hal_emulator_get(const char* name);

// The trace: on forgets what was recorded before. The records are a JSON list, valid until the next call.
void hal_emulator_trace(int on);
const char* hal_emulator_trace_records();

// Arms a fault. `kind`: "malloc", "launch", "execution", "hang", "delay", "stream" or "copy". `name` restricts it to
// one kernel; empty means any. Of the occasions that match, number `first` (from 1 on) fails, and the `count` - 1 after
// it; count 0 means all. `code` is what fails with; `milliseconds` how long a kernel hangs or is delayed. Returns a
// number to withdraw it by.
int hal_emulator_arm(const char* kind, const char* name, int64_t first, int64_t count, int code, int milliseconds);
// Returns how often the fault struck, or -1 for a number that is not known.
int64_t hal_emulator_disarm(int number);

// A schedule seed; without one (`seeded` 0) streams run freely.
void hal_emulator_seed(int seeded, uint64_t seed);

// How many are live: "stream", "event", "graph", "group", "allocation" (of device memory), "pinned" (of host memory);
// "task" counts tasks in captured graphs, and "captured" the streams that graphs hold. -1 for another name.
int64_t hal_emulator_live(const char* kind);

// Bytes in use on a device, and the most there ever were.
int64_t hal_emulator_memory(int device, int peak);

}  // extern "C"
