// A communicator of one rank: the memory that it shares with the others, and how it learns that one is lost.
// Collectives of this library use it through collective.h, and so do fused operations, such as a matrix product with an
// all-reduce, which find it by the name that torch_npu passes to them.
#pragma once

#include <chrono>
#include <mutex>
#include <vector>

#include "hccl/doorbell.h"
#include "hccl/layout.h"

namespace emulator {

class Communicator {
  public:
    Communicator(uint32_t rank, uint32_t ranks, int device) : rank(rank), ranks(ranks), device(device) {}
    ~Communicator();

    const uint32_t rank, ranks;
    const int device;
    std::string name;
    bool is_part = false;                    // of another communicator
    std::chrono::duration<double> limit{0};  // how long a collective waits for other ranks; 0 for ever
    std::atomic<HcclResult> error{HCCL_SUCCESS};  // for HcclGetCommAsyncError
    size_t buffer_bytes = 0;                 // of each of its buffers; fused operations exchange data through them

    // Shared memory. A collective's number selects its slot.
    Control& control() const { return *reinterpret_cast<Control*>(shared.data()); }
    Member& member(uint32_t each) const { return control().members[each]; }
    Member& self() const { return member(rank); }
    Outbox& outbox(uint32_t each) const { return *reinterpret_cast<Outbox*>(outboxes[each].data()); }
    char* slot(uint32_t each, uint64_t number) const {
        return outboxes[each].data() + outbox_bytes + number % slots * slot_bytes;
    }
    char* mailbox(uint32_t from, uint32_t to) const {
        return outboxes[from].data() + outbox_bytes + slots * slot_bytes + to * mailbox_bytes;
    }
    // Gives back the pages of this rank's memory from `begin`, of which `bytes` were written, if they are many.
    void give_back(const char* begin, size_t bytes) const;
    // Gives back the pages of this rank's slots that all ranks have read. Requires `numbering`.
    void give_back_slots();

    void ring(uint32_t other) const { peers[other]->ring(); }
    void ring_others() const;
    // Returns why a rank will do nothing any more, or an empty string.
    std::string lost(uint32_t other) const;

    // Makes all collectives of all ranks fail from number `at` on. The first cause is kept.
    void break_off(uint64_t at, const std::string& cause);
    // Returns why a collective must fail, or an empty string.
    std::string why_broken(uint64_t number) const;

    // Numbers this rank's collectives, from 0, in the order in which they start to run.
    std::mutex numbering;
    std::atomic<uint64_t> next = 0;
    size_t written[slots] = {};  // bytes in this rank's slots
    // Launches that are neither captured nor complete.
    std::atomic<int> pending{0};

    // The dispatch and combine of experts' tokens need a communicator that nothing else uses. Returns whether this use is
    // the first, or the same as the first.
    enum class Use { none, collectives, experts };
    bool claim(Use use) {
        Use found = Use::none;
        return used.compare_exchange_strong(found, use) || found == use;
    }

    // Ends this rank's part, as HcclCommDestroy does. Must not be called with the machine's lock.
    void close();
    bool is_closed() const { return closed; }

  private:
    friend class Rendezvous;
    SharedMemory shared;
    std::vector<SharedMemory> outboxes;
    std::vector<std::unique_ptr<Peer>> peers;
    std::shared_ptr<SharedDoorbell> doorbell;
    std::atomic<bool> closed{false};
    std::atomic<Use> used{Use::none};
};

using CommunicatorPointer = std::shared_ptr<Communicator>;

HcclComm keep(CommunicatorPointer communicator);  // returns its handle
// Return the communicator of a handle, or of a name on a device; null if there is none.
CommunicatorPointer find_communicator(HcclComm handle);
CommunicatorPointer find_communicator(const std::string& name, int device);
CommunicatorPointer forget(HcclComm handle);

}  // namespace emulator
