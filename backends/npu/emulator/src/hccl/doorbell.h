// How processes wake each other. Each process with a communicator shares a counter, which others increment when they have
// written something for it. Its workers read the counter while they spin. A thread waits for it while they sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "hccl/shared_memory.h"

namespace emulator {

struct Bell {
    std::atomic<uint32_t> rings;      // a futex
    std::atomic<uint32_t> listening;  // whether a thread of the process waits for the futex
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
class Doorbell {
  public:
    static std::shared_ptr<Doorbell> get();
    Doorbell();
    ~Doorbell();
    int descriptor() const { return memory.descriptor(); }

  private:
    static void listen(uint32_t seen);
    void run();
    SharedMemory memory;
    std::mutex mutex;
    std::condition_variable changed;
    bool armed = false, stopping = false;
    uint32_t seen = 0;
    std::thread thread;
};

}  // namespace emulator
