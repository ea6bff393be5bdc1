// Collectives as launches. A rank puts its data where the others can read it; once all ranks have done so, each takes what
// it needs. Nothing blocks a worker: the launch is asked again whether it can go on.
// The interfaces of HCCL use it, and so do operations that compute and communicate; see ops/fused_collective.h.
#pragma once

#include <functional>

#include "hccl/communicator.h"
#include "runtime/launch.h"

namespace emulator {

// One execution of a collective, when the data of all ranks is there.
struct Turn {
    const Communicator& communicator;
    uint64_t number;
    uint32_t rank() const { return communicator.rank; }
    uint32_t ranks() const { return communicator.ranks; }
    char* data(uint32_t each) const { return communicator.slot(each, number); }
    const Counts& counts(uint32_t each) const { return communicator.outbox(each).posted[number % slots].counts; }
};

struct Collective {
    Call call;               // must be the same on all ranks
    size_t bytes = 0;        // of this rank's data
    std::vector<Counts> counts = {};  // none or one: what the other ranks see as Turn::counts
    // Writes this rank's data. If it throws, the call fails on all ranks.
    std::function<void(char* slot)> put = nullptr;
    // Returns why the ranks' counts do not match, or an empty string. All ranks must come to the same result.
    std::function<std::string(const Turn&)> mismatch = nullptr;
    // Changes this rank's part of the data of ranks; `take` is called when all have done so. Optional.
    std::function<void(const Turn&)> combine = nullptr;
    std::function<void(const Turn&)> take = nullptr;
};

// Launches a collective. Sets the functions of the launch. Returns an ACL error code.
int launch_collective(const CommunicatorPointer& communicator, aclrtStream stream, Launch launch, Collective collective);

}  // namespace emulator
