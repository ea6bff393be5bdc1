// What the operator libraries use of the emulated runtime. Nothing here knows of ATen.
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

// A piece of device memory that a launch touches: `bytes` from `address` on, whatever the strides leave out.
struct Operand {
    const void* address;
    size_t bytes;
    Access access;
    int dtype;  // aclDataType
    std::vector<int64_t> shape;
};

// One kernel launch. `run` is called on the stream's worker, once for each execution: a captured launch is run by every
// replay. It throws to fail; the stream then reports it as hardware would, at the next call that waits for the stream.
struct Launch {
    std::string kernel;
    std::vector<Operand> operands;
    double flops = 0;
    std::function<void()> run;
};

// Enqueues a launch, or records it if the stream is capturing. Returns an ACL error code.
int launch(aclrtStream stream, Launch launch);

// Remembers why, for aclGetRecentErrMsg on this thread, and returns `code`: `return fail(107024, "...");`
int fail(int code, const std::string& reason);

// Where kernels find what lies at a device address. The host cannot read or write the device address itself.
// Null for null. Throws std::out_of_range for an address that no device owns.
void* backing(const void* device_address);

// What the documents' limits depend on: the name of the SoC, such as Ascend910B3, and the release of CANN, 901 for 9.1.0.
const std::string& soc_name();
int cann_release();

// Has `function` called once in every thread that runs launches, before its first one. Call it while the library loads.
void on_worker_start(void (*function)());

}  // namespace emulator
