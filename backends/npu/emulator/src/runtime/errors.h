// Error codes and their reasons, and the failures that surface later, at a wait.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>

#include "acl/acl_rt.h"
#include "acl/error_codes/rt_error_codes.h"
#include "runtime/launch.h"

namespace emulator {

// Thrown by work on the device; the stream keeps it until the host next waits for the stream.
struct DeviceError : std::runtime_error {
    DeviceError(int code, const std::string& reason) : std::runtime_error(reason), code(code) {}
    int code;
};

// What went wrong on the device. Copies know of each other: it is reported once, wherever the host waits first.
struct Failure {
    int code = 0;
    std::string reason;
    std::shared_ptr<bool> reported;
    explicit operator bool() const { return code != 0; }
};
// Clears the failure and fails with it, if there is one that was not reported yet.
int report(Failure& failure);

// How often something failed so far, on any thread.
uint64_t failures();

// Fails if torch_npu's task queue stopped: what its thread was refused ends it, and all that torch_npu hands it later is
// dropped without a word, so whoever waits for that would read memory that nobody wrote.
int refuse_after_task_queue();

// printf into a string, for reasons.
[[gnu::format(printf, 1, 2)]] std::string format(const char* text, ...);

}  // namespace emulator
