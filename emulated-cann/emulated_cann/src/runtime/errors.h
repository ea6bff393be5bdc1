// Error codes and reasons, and asynchronous failures, which a later wait reports.
#pragma once

#include <memory>
#include <set>
#include <stdexcept>
#include <string>

#include "acl/acl_rt.h"
#include "acl/error_codes/rt_error_codes.h"
#include "runtime/launch.h"

namespace emulator {

// Thrown by work on the device. The stream keeps it until the host next waits for the stream.
struct DeviceError : std::runtime_error {
    DeviceError(int code, const std::string& reason) : std::runtime_error(reason), code(code) {}
    int code;
};

// Returns an id of the calling thread for Failure. It is 0 for torch_npu's task queue, which launches for other
// threads.
uint64_t host_thread();

// A failure on the device. The first host thread that waits reports it, and once every other thread that lost work,
// because otherwise that thread would read memory that was never written. Copies share this state.
struct Failure {
    int code = 0;
    std::string reason;
    std::shared_ptr<std::set<uint64_t>> reported_to;  // ids of threads; guarded by the machine's lock
    explicit operator bool() const { return code != 0; }
    bool reported() const { return reported_to && !reported_to->empty(); }
};
// Fails with the failure, if there is one, if it was not reported to this thread, and if it was not reported to any or
// this thread lost work.
int report(const Failure& failure, bool lost);

// Returns the number of errors so far, on all threads.
uint64_t failures();

// Fails if torch_npu's task queue stopped. An error on its thread stops it, and torch_npu then drops all later work
// silently, so a wait that succeeded would expose memory that was never written.
int refuse_after_task_queue();

// Formats a string like printf.
[[gnu::format(printf, 1, 2)]] std::string format(const char* text, ...);

}  // namespace emulator
