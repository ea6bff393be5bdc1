// How the ranks of a communicator find each other and map each other's memory.
#pragma once

#include "hccl/communicator.h"

namespace emulator {

// Writes what other processes need to find the rank that calls it.
void make_root_info(HcclRootInfo& info);

struct Settings {
    std::string name;  // empty for a generated one
    double limit = -1;  // seconds that a collective waits; negative for the value of HCCL_EXEC_TIMEOUT
    uint32_t buffer = HCCL_COMM_BUFFSIZE_CONFIG_NOT_SET;  // MiB; not set for the value of HCCL_BUFFSIZE
    uint64_t hash = 0;  // of what must be the same on all ranks
};

// One rank's way into a communicator. Each step throws HcclError, and then the other ranks' steps fail too. One thread can
// take several ranks through: it calls `map` of all, and then `finish` of all.
class Rendezvous {
  public:
    static Rendezvous of_root(const HcclRootInfo& info, uint32_t ranks, uint32_t rank, int device, const Settings&);
    // Of the ranks `members` of a communicator, of which this rank is number `rank`. `key` is the same on all of them.
    static Rendezvous of_part(Communicator& whole, const std::vector<uint32_t>& members, uint32_t rank, uint64_t key,
                              const Settings&);
    Rendezvous(Rendezvous&&) = default;
    void map();
    CommunicatorPointer finish();

  private:
    Rendezvous() = default;
    void publish(const Settings& settings);
    void await(const char* what, std::atomic<uint32_t> Member::* flag);
    [[noreturn]] void fail_all(HcclResult code, const std::string& reason);
    CommunicatorPointer communicator;
    std::shared_ptr<void> opening;  // while it lives, others can open the control memory that this process created
    std::chrono::steady_clock::time_point end;
};

}  // namespace emulator
