// The interface between the runtime and Python, which is not part of CANN; see control.py.
#pragma once

#include <cstdint>

extern "C" {

// Sets an option. "devices", "memory" (bytes per device), "streams" and "tasks" (limits per device) and "stall"
// (seconds without progress after which a wait of the host fails) are decimal numbers; "soc" and "version" (of CANN)
// are strings. "devices" and "memory" must be set before the first use of a device. Returns 0, or -1 for an unknown
// name or an invalid value.
int emulated_cann_set(const char* name, const char* value);
// Returns the value of a numeric option, or -1 for another name.
int64_t emulated_cann_get(const char* name);

// Starts or stops the trace. Starting deletes earlier records.
void emulated_cann_trace(int on);
// Returns the records as a JSON list, valid until the next call.
const char* emulated_cann_trace_records();

// Starts or stops looking for races. Returns whether they were looked for before. Starting deletes those found earlier.
int emulated_cann_races(int on);
// Returns the races found since then as a JSON list, valid until the next call.
const char* emulated_cann_races_found();
// Looks for races from now on, prints each, and exits with status 66 if there are any.
void emulated_cann_report_races();

// Writes what runs from now on to a file, which must hold an empty JSON list and its end in a line of its own.
void emulated_cann_trace_to(const char* path);

// Injects a fault. `kind` is "malloc", "launch", "execution", "hang", "delay", "stream" or "copy". `name` restricts it
// to one kernel; empty means any. `count` matching calls fail, from number `first` (counted from 1) on; count 0 means
// all. `code` is the error code; `milliseconds` is the duration of a hang or delay. Returns the number of the fault,
// for emulated_cann_disarm.
int emulated_cann_arm(const char* kind, const char* name, int64_t first, int64_t count, int code, int milliseconds);
// Removes a fault. Returns how often it occurred, or -1 for an unknown number.
int64_t emulated_cann_disarm(int number);

// Sets the schedule seed. With `seeded` 0, streams run without one.
void emulated_cann_seed(int seeded, uint64_t seed);

// Returns the number of live objects: "stream", "event", "graph", "group", "allocation" (device memory), "pinned" (host
// memory), "task" (tasks in captured graphs) or "captured" (streams held by graphs). Returns -1 for another name.
int64_t emulated_cann_live(const char* kind);

// Returns the bytes in use on a device, or their peak.
int64_t emulated_cann_memory(int device, int peak);

// A tensor of a launch: bytes from a device address, and whether it is also written.
struct emulated_cann_operand {
    const void* address;
    uint64_t bytes;
    int written;
    int dtype;  // aclDataType
    int dims;
    const int64_t* shape;
};
// Launches a kernel that calls function(number), which returns 0 unless it failed. Returns an ACL error code.
int emulated_cann_launch(void* stream, const char* kernel, const emulated_cann_operand* operands, int count,
                         int (*function)(int64_t number), int64_t number);
// Returns the number of a launch that will not run again, once, or -1 if there is none.
int64_t emulated_cann_dropped();
// Returns the host address of the memory at a device address, which must be valid.
void* emulated_cann_backing(const void* address);

}  // extern "C"
