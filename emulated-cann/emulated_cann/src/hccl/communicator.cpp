#include "hccl/communicator.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "runtime/errors.h"

namespace emulator {

namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kept_bytes = size_t{1} << 20;  // of a slot or mailbox, between messages
constexpr auto patience = std::chrono::seconds(1);

struct Registry {
    std::mutex mutex;
    std::vector<CommunicatorPointer> all;  // in the order of creation
};
Registry& registry() {
    static auto* only = new Registry;
    return *only;
}

}  // namespace

Communicator::~Communicator() {
    if (shared.data()) self().left = 1;
}

void Communicator::give_back(const char* begin, size_t bytes) const {
    if (bytes <= kept_bytes) return;
    outboxes[rank].release(static_cast<size_t>(begin - outboxes[rank].data()) + kept_bytes, bytes - kept_bytes);
}

void Communicator::give_back_slots() {
    for (uint64_t each = 0; each < slots; ++each) {
        if (written[each] <= kept_bytes) continue;
        uint64_t last = self().posted[each];
        bool is_read = true;
        for (uint32_t other = 0; other < ranks; ++other) is_read = is_read && member(other).finished[each] >= last;
        if (is_read) give_back(slot(rank, each), std::exchange(written[each], 0));
    }
}

void Communicator::ring_others() const {
    if (peers.size() < ranks) return;  // it failed before it was complete
    for (uint32_t other = 0; other < ranks; ++other) {
        if (other != rank) ring(other);
    }
}

std::string Communicator::lost(uint32_t other) const {
    if (member(other).left) return format("rank %u has destroyed its communicator", other);
    if (peers[other]->has_ended()) return format("the process of rank %u (%d) has ended", other, member(other).process);
    return "";
}

void Communicator::break_off(uint64_t at, const std::string& cause) {
    uint32_t expected = intact;
    Control& all = control();
    if (!all.state.compare_exchange_strong(expected, breaking)) return;
    all.broken_at = std::min(at, next.load());  // messages have no number
    std::strncpy(all.cause, cause.c_str(), sizeof(all.cause) - 1);
    all.state = broken;
    ring_others();
}

std::string Communicator::why_broken(uint64_t number) const {
    if (closed) return "the communicator was destroyed";
    Control& all = control();
    if (all.state == intact) return "";
    // The rank that broke it may have been killed while it wrote the cause.
    for (int attempts = 0; all.state == breaking && attempts < 1000; ++attempts) std::this_thread::yield();
    if (all.state == breaking) return "the communicator is broken, by a rank that has ended";
    return number < all.broken_at ? "" : std::string("the communicator is broken: ") + all.cause;
}

void Communicator::close() {
    auto end = Clock::now() + patience;
    while (pending && Clock::now() < end && control().state == intact) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (pending) {
        break_off(0, format("rank %u destroyed its communicator %s, which still waited for others", rank, name.c_str()));
    }
    closed = true;
    self().left = 1;
    ring_others();
    look_again();
    doorbell.reset();
}

HcclComm keep(CommunicatorPointer communicator) {
    std::lock_guard lock(registry().mutex);
    registry().all.push_back(communicator);
    return communicator.get();
}

CommunicatorPointer find_communicator(HcclComm handle) {
    std::lock_guard lock(registry().mutex);
    auto& all = registry().all;
    auto found = std::find_if(all.begin(), all.end(), [&](auto& each) { return each.get() == handle; });
    return found == all.end() ? nullptr : *found;
}

CommunicatorPointer find_communicator(const std::string& name, int device) {
    std::lock_guard lock(registry().mutex);
    auto& all = registry().all;
    auto found = std::find_if(all.rbegin(), all.rend(),
                              [&](auto& each) { return each->device == device && each->name == name; });
    return found == all.rend() ? nullptr : *found;
}

CommunicatorPointer forget(HcclComm handle) {
    auto found = find_communicator(handle);
    std::lock_guard lock(registry().mutex);
    std::erase(registry().all, found);
    return found;
}

}  // namespace emulator
