// How processes wake each other. Each process with a communicator shares a counter, which others increment when they have
// written something for it. Its workers read the counter while they spin, and then sleep by it.
#pragma once

#include <atomic>
#include <memory>

#include "hccl/shared_memory.h"
#include "runtime/launch.h"

namespace emulator {

struct Bell {
    std::atomic<uint32_t> rings;      // a futex
    std::atomic<uint32_t> listening;  // whether a thread of the process may sleep by the futex
};

// Another process, or this one, as a communicator sees it.
class Peer {
  public:
    Peer(int process, int descriptor);
    Peer(const Peer&) = delete;
    ~Peer();
    void ring();
    bool has_ended();
    const int process;

  private:
    SharedMemory memory;
    int handle;  // a pidfd, or -1 for this process
    std::atomic<bool> ended{false};
};

// The doorbell of this process. It exists while the process has a communicator.
class SharedDoorbell : public Doorbell {
  public:
    static std::shared_ptr<SharedDoorbell> get();
    SharedDoorbell();
    int descriptor() const { return memory.descriptor(); }
    uint32_t rings() const override;
    void wait(uint32_t seen) override;
    void ring() override;

  private:
    SharedMemory memory;
};

}  // namespace emulator
