// The interface between the operator libraries and the emulated runtime. It does not depend on ATen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
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
};

// One kernel launch. The stream's worker calls `run` once for each execution, so every replay calls it for a captured
// launch. An exception of `run` is a device error, which the next call that waits for the stream reports.
struct Launch {
    std::string kernel;
    std::vector<Operand> operands;
    double flops = 0;
    std::function<void()> run;
};

// Enqueues a launch, or records it if the stream is captured. Returns an ACL error code.
int launch(aclrtStream stream, Launch launch);

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
