// Error codes and their reasons, and the failures that surface later, at a wait.
#pragma once

#include <memory>
#include <set>
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

// The calling thread, as it is known to failures: never 0 but for torch_npu's task queue, which launches for others.
uint64_t host_thread();

// What went wrong on the device. Copies know of each other: it is reported wherever a host thread waits first, and once
// to every other thread that lost work by it, as else that would read memory that nobody wrote.
struct Failure {
    int code = 0;
    std::string reason;
    std::shared_ptr<std::set<uint64_t>> told;  // threads; with the machine's lock held
    explicit operator bool() const { return code != 0; }
    bool reported() const { return told && !told->empty(); }
};
// Fails with the failure, if there is one and this thread does not know of it: if nobody does, or it lost work by it.
int report(const Failure& failure, bool lost);

// How often something failed so far, on any thread.
uint64_t failures();

// Fails if torch_npu's task queue stopped: what its thread was refused ends it, and all that torch_npu hands it later is
// dropped without a word, so whoever waits for that would read memory that nobody wrote.
int refuse_after_task_queue();

// printf into a string, for reasons.
[[gnu::format(printf, 1, 2)]] std::string format(const char* text, ...);

}  // namespace emulator
