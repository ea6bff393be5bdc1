// The interface between the operator libraries and the emulated runtime. It does not depend on ATen.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "acl/acl_rt.h"
#include "runtime/source.h"

namespace emulator {

enum class Access : uint8_t { read, write, read_write };

// A range of device memory that a launch accesses: `bytes` from `address` on, including gaps between strided elements.
struct Operand {
    const void* address;
    size_t bytes;
    Access access;
    int dtype;  // aclDataType
    std::vector<int64_t> shape;
    std::vector<int64_t> strides = {};  // in elements; empty if the tensor has no gaps
};

// The communicator of a launch, for the trace.
struct Ranks {
    std::string communicator;
    uint32_t rank = 0, count = 0;
};

// One kernel launch. The stream's worker calls `run` once for each execution, so every replay calls it for a captured
// launch. An exception of `run` is a device error, which the next call that waits for the stream reports.
struct Launch {
    std::string kernel;
    std::vector<Operand> operands;
    double flops = 0;
    std::function<void()> run;

    // The functions below are for launches that wait for other processes; see collective.h. They may be empty.
    // Returns whether `run` can be called. Called with the machine's lock held, again and again.
    std::function<bool()> ready = nullptr;
    // Returns whether `run` must be called again, once `ready` permits it, before the launch is complete.
    std::function<bool()> unfinished = nullptr;
    // Called with the machine's lock held at the end of every execution. The argument is null if the launch completed;
    // otherwise it says why it did not: it failed, or was skipped because of an earlier failure.
    std::function<void(const char* problem)> ended = nullptr;
    Ranks ranks = {};
    uint32_t call = 0;  // the Python stack of the call, see call_stack; set by `launch` if it is 0
};

// Returns the number of the calling thread's Python stack, for reports of races and traces. Returns 0 if neither is
// wanted, or if the thread runs no Python code. Requires that the machine's lock is not held.
uint32_t call_stack();

// Enqueues a launch, or records it if the stream is captured. Returns an ACL error code.
int launch(aclrtStream stream, Launch launch);

// The device of a live stream, and whether the stream is captured. Returns false for a stale handle.
struct StreamState {
    int device = 0;
    bool captured = false;
};
bool state_of(aclrtStream stream, StreamState* state);

// Other processes ring it when they have done something that a launch of this process may wait for.
class Doorbell {
  public:
    virtual ~Doorbell() = default;
    virtual uint32_t rings() const = 0;  // their number
    // Sleeps until `rings` differs from `seen`. May return earlier, and does so from time to time, because launches also
    // wait for time limits.
    virtual void wait(uint32_t seen) = 0;
    virtual void ring() = 0;  // for this process itself
};
// Sets the doorbell by which workers sleep. They use it while it exists.
void set_doorbell(std::weak_ptr<Doorbell> doorbell);
// Makes waiting streams call `ready` again.
void look_again();

// Records the reason for aclGetRecentErrMsg on this thread, and returns `code`: `return fail(107024, "...");`
int fail(int code, const std::string& reason);

// Returns the host address of the memory at a device address, or null for null. The host cannot access the device
// address itself. Throws std::out_of_range for an address that no device owns.
void* backing(const void* device_address);

// The name of the SoC, such as Ascend910B3, and the release of CANN, such as 901 for 9.1.0. Documented limits depend on
// them.
const std::string& soc_name();
int cann_release();

// Registers a function that every worker thread calls once before its first launch. Must be called while the library
// loads.
void on_worker_start(void (*function)());

}  // namespace emulator
