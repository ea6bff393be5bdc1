// Launches that wait for other ranks.
#pragma once

#include "hccl/communicator.h"
#include "runtime/errors.h"
#include "runtime/launch.h"

namespace emulator {

// Of a disagreement, no rank knows which is wrong.
constexpr int disagreement = ACL_ERROR_RT_SUSPECT_REMOTE_ERROR, lost_rank = ACL_ERROR_RT_SUSPECT_REMOTE_ERROR,
              too_late = ACL_ERROR_RT_TASK_TIMEOUT;

// Breaks the communicator from collective `number` on, and throws a DeviceError.
[[noreturn]] void fail_all(Communicator& communicator, uint64_t number, int code, const std::string& reason);

// What an execution waits for. Kept from one look to the next.
class Wait {
  public:
    // Returns whether the execution can go on or must fail. `lacking` is a rank that has not got far enough, or -1.
    bool over(const Communicator& communicator, uint64_t number, int lacking);
    // Returns whether the execution can go on. Throws if it never will.
    // `call` says what this rank calls. `lacking` is called again, because a rank may get far enough and leave meanwhile.
    bool check(Communicator& communicator, const std::function<std::string()>& call, uint64_t number,
               const std::function<int()>& lacking);
    void reset() { started = false; }

  private:
    bool is_expired(const Communicator& communicator) const;
    bool started = false;
    std::chrono::steady_clock::time_point start, looked;  // looked for lost ranks
};

// Begins a launch that waits for ranks: refuses a stream of another device, and breaks the communicator if it cannot be
// launched, because the other ranks would pair the next call with this one. Returns an ACL error code.
int submit_waiting(const CommunicatorPointer& communicator, aclrtStream stream, Launch launch);
// Breaks the communicator because an execution failed or was skipped. May be called with the machine's lock.
void abandon(Communicator& communicator, uint64_t number, const char* kernel, const char* problem);

// Launches `execution`, which has the functions ready, run and unfinished of a launch, and reset, which prepares it for
// another execution and returns the number of the collective.
template <class Execution>
int launch_waiting(const CommunicatorPointer& communicator, aclrtStream stream, Launch launch,
                   std::shared_ptr<Execution> execution) {
    launch.ready = [execution] { return execution->ready(); };
    launch.run = [execution] { execution->run(); };
    launch.unfinished = [execution] { return execution->unfinished(); };
    launch.ended = [execution, communicator, kernel = launch.kernel](const char* problem) {
        uint64_t number = execution->reset();
        if (problem) abandon(*communicator, number, kernel.c_str(), problem);
    };
    launch.ranks = {communicator->name, communicator->rank, communicator->ranks};
    return submit_waiting(communicator, stream, std::move(launch));
}

}  // namespace emulator
