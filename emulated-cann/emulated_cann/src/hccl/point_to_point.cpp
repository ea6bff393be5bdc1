// Messages between two ranks. All messages of a group, or of HcclBatchSendRecv, on one stream are one launch, which moves
// each as soon as its partner is there. A send is complete when it was received.
#include <algorithm>
#include <cstring>
#include <utility>

#include "hccl/hccl.h"
#include "hccl/interface.h"
#include "hccl/waiting.h"

DOCUMENTED("hccl: docs/zh/api_ref/comm_op_interface/p2p_comm.md");

namespace emulator {

namespace {

struct Message {
    bool is_send;
    uint32_t other;
    Call call;  // without the root
    Operand buffer;
    enum class State { waiting, sent, done } state = State::waiting;
    uint64_t number = 0;  // of a message that was sent, among those to the receiver
};

std::string describe(const Communicator& communicator, const Message& message) {
    return format("rank %u calls %s of %lu ", communicator.rank, message.is_send ? "HcclSend" : "HcclRecv",
                  static_cast<unsigned long>(message.call.count)) +
           dtype_name(message.call.dtype) + format(message.is_send ? " to rank %u" : " from rank %u", message.other);
}

// The execution of messages in progress.
class Exchange {
  public:
    Exchange(CommunicatorPointer communicator, std::vector<Message> messages)
        : communicator(std::move(communicator)), messages(std::move(messages)) {}

    bool ready() {
        if (some_can_move()) wait.reset();
        return wait.over(*communicator, always, lacking());
    }

    void run() {
        bool moved = false;
        for (auto& each : messages) {
            while (can_move(each)) {
                move(each);
                moved = true;
            }
        }
        auto* blocked = first_blocked();
        if (moved || !blocked) return wait.reset();
        wait.check(*communicator, [&] { return describe(*communicator, *blocked); }, always, [this] { return lacking(); });
    }

    bool unfinished() const { return first_blocked() != nullptr; }

    uint64_t reset() {
        for (auto& each : messages) each.state = Message::State::waiting;
        wait.reset();
        return communicator->next;
    }

  private:
    // Messages have no place in the order of collectives, so they fail when any collective has failed.
    static constexpr uint64_t always = ~uint64_t{0};

    const Message* first_blocked() const {
        auto found = std::find_if(messages.begin(), messages.end(),
                                  [](auto& each) { return each.state != Message::State::done; });
        return found == messages.end() ? nullptr : &*found;
    }

    bool some_can_move() const {
        return std::any_of(messages.begin(), messages.end(), [&](auto& each) { return can_move(each); });
    }

    // Returns the rank that the first unfinished message waits for, or -1 if there is none or a message can move.
    int lacking() const {
        auto* blocked = first_blocked();
        return some_can_move() || !blocked ? -1 : static_cast<int>(blocked->other);
    }

    std::atomic<uint64_t>& sent(uint32_t from, uint32_t to) const { return communicator->member(from).sent[to]; }
    std::atomic<uint64_t>& received(uint32_t from, uint32_t to) const { return communicator->member(to).received[from]; }

    // Messages to or from one rank keep their order.
    bool is_first(const Message& message) const {
        for (auto& each : messages) {
            if (&each == &message) return true;
            if (each.is_send == message.is_send && each.other == message.other &&
                each.state == Message::State::waiting) {
                return false;
            }
        }
        return true;
    }

    bool can_move(const Message& message) const {
        uint32_t self = communicator->rank, other = message.other;
        switch (message.state) {
            case Message::State::waiting:
                if (!is_first(message)) return false;
                // A mailbox holds one message.
                if (message.is_send) return received(self, other) == sent(self, other);
                return sent(other, self) > received(other, self);
            case Message::State::sent:
                return received(self, other) >= message.number;
            default:
                return false;
        }
    }

    void move(Message& message) {
        uint32_t self = communicator->rank, other = message.other;
        if (message.state == Message::State::sent) {
            message.state = Message::State::done;
            // Another message may already be in the mailbox.
            if (sent(self, other) == message.number) {
                communicator->give_back(communicator->mailbox(self, other), message.buffer.bytes);
            }
        } else if (message.is_send) {
            communicator->outbox(self).message[other] = message.call;
            if (message.buffer.bytes) {
                std::memcpy(communicator->mailbox(self, other), backing(message.buffer.address), message.buffer.bytes);
            }
            message.number = ++sent(self, other);
            message.state = Message::State::sent;
            communicator->ring(other);
        } else {
            take(message);
        }
    }

    void take(Message& message) {
        uint32_t self = communicator->rank, other = message.other;
        const Call& found = communicator->outbox(other).message[self];
        if (std::memcmp(&found, &message.call, sizeof(Call)) != 0) {
            fail_all(*communicator, communicator->next, disagreement,
                     describe(*communicator, message) +
                         format(", which calls HcclSend of %lu ", static_cast<unsigned long>(found.count)) +
                         dtype_name(found.dtype));
        }
        if (message.buffer.bytes) {
            std::memcpy(backing(message.buffer.address), communicator->mailbox(other, self), message.buffer.bytes);
        }
        ++received(other, self);
        message.state = Message::State::done;
        communicator->ring(other);
    }

    CommunicatorPointer communicator;
    std::vector<Message> messages;
    Wait wait;
};

// Messages on one stream that are launched together.
struct Batch {
    CommunicatorPointer communicator;
    aclrtStream stream;
    std::vector<Message> messages;
};
thread_local std::vector<Batch> batches;  // of the group

HcclResult launch_batch(Batch batch, const char* name) {
    Launch launch;
    launch.kernel = name;
    for (auto& each : batch.messages) {
        if (each.buffer.bytes) launch.operands.push_back(each.buffer);
    }
    // Receivers may wait for what this rank sends to itself.
    std::stable_partition(batch.messages.begin(), batch.messages.end(), [](auto& each) { return each.is_send; });
    auto exchange = std::make_shared<Exchange>(batch.communicator, std::move(batch.messages));
    return launch_waiting(batch.communicator, batch.stream, std::move(launch), std::move(exchange)) ? HCCL_E_RUNTIME
                                                                                                     : HCCL_SUCCESS;
}

HcclResult launch_group() {
    HcclResult result = HCCL_SUCCESS;
    for (auto& each : std::exchange(batches, {})) {
        HcclResult code = launch_batch(std::move(each), "HcclGroup");
        if (!result) result = code;
    }
    return result;
}

Message message_of(Communicator& communicator, const char* interface, bool is_send, void* buffer, uint64_t count,
                   HcclDataType dtype, uint32_t other) {
    claim(communicator, interface);
    check(call_of(interface, count, dtype));
    if (other >= communicator.ranks) {
        throw HcclError(HCCL_E_PARA, std::string(interface) + format(": rank %u is not one of the %u ranks of ", other,
                                                                     communicator.ranks) +
                                         communicator.name);
    }
    Call call = call_of("message", count, dtype);
    auto range = operand(buffer, count, call, is_send ? Access::read : Access::write);
    if (range.bytes > mailbox_bytes) {
        OURS("a limit");
        throw HcclError(HCCL_E_MEMORY, std::string(interface) + format(" of %zu bytes: a message has at most %zu",
                                                                       range.bytes, mailbox_bytes));
    }
    return {is_send, other, call, range};
}

HcclResult message(const char* interface, bool is_send, void* buffer, uint64_t count, HcclDataType dtype,
                   uint32_t other, HcclComm handle, aclrtStream stream) {
    return guarded([&] {
        auto communicator = communicator_of(handle, interface);
        join_group(GroupKind::point_to_point, interface);
        Message made = message_of(*communicator, interface, is_send, buffer, count, dtype, other);
        if (!count) return HCCL_SUCCESS;
        if (!in_group()) return launch_batch({communicator, stream, {made}}, interface);
        auto found = std::find_if(batches.begin(), batches.end(), [&](auto& each) {
            return each.communicator == communicator && each.stream == stream;
        });
        if (found == batches.end()) found = batches.insert(batches.end(), {communicator, stream, {}});
        found->messages.push_back(std::move(made));
        at_group_end(launch_group);
        return HCCL_SUCCESS;
    });
}

}  // namespace

}  // namespace emulator

using namespace emulator;

extern "C" {

HcclResult HcclSend(void* buffer, uint64_t count, HcclDataType dtype, uint32_t to, HcclComm handle,
                    aclrtStream stream) {
    return message("HcclSend", true, buffer, count, dtype, to, handle, stream);
}

HcclResult HcclRecv(void* buffer, uint64_t count, HcclDataType dtype, uint32_t from, HcclComm handle,
                    aclrtStream stream) {
    return message("HcclRecv", false, buffer, count, dtype, from, handle, stream);
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm handle, aclrtStream stream) {
    return guarded([&] {
        auto communicator = communicator_of(handle, "HcclBatchSendRecv");
        if (in_group()) {
            DOCUMENTED("hcomm: docs/zh/api_ref/comm_mgr_c/HcclGroupStart.md");
            throw HcclError(HCCL_E_NOT_SUPPORT, "HcclBatchSendRecv must not be called in a group");
        }
        if (!items) throw HcclError(HCCL_E_PTR, "HcclBatchSendRecv: the items are null");
        Batch batch{communicator, stream, {}};
        for (uint32_t i = 0; i < count; ++i) {
            auto& item = items[i];
            auto made = message_of(*communicator, "HcclBatchSendRecv", item.sendRecvType == HCCL_SEND, item.buf,
                                   item.count, item.dataType, item.remoteRank);
            if (item.count) batch.messages.push_back(std::move(made));
        }
        if (batch.messages.empty()) return HCCL_SUCCESS;
        return launch_batch(std::move(batch), "HcclBatchSendRecv");
    });
}

}  // extern "C"
