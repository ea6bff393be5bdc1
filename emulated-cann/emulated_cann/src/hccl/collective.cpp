#include "hccl/collective.h"

#include <cstring>
#include <utility>

#include "hccl/data_types.h"
#include "hccl/waiting.h"

namespace emulator {

namespace {

// The execution of a collective in progress. A replay starts when the one before has ended.
class Execution {
  public:
    Execution(CommunicatorPointer communicator, Collective collective)
        : communicator(std::move(communicator)), collective(std::move(collective)) {}

    bool ready() { return wait.over(*communicator, number_now(), lacking()); }

    void run() {
        // The rank that comes last needs no second look.
        while (phase != Phase::done) {
            // Before a rank that is faster breaks the communicator, so that all report the same.
            if (phase != Phase::post && lacking() < 0) agree();
            if (!wait.check(*communicator, [this] { return described(); }, number_now(), [this] { return lacking(); })) {
                return;
            }
            step();
        }
    }

    bool unfinished() const { return phase != Phase::done; }

    uint64_t reset() {
        uint64_t number = number_now();
        phase = Phase::post;
        agreed = false;
        wait.reset();
        return number;
    }

  private:
    enum class Phase { post, combine, take, done };

    std::string described() const { return format("rank %u calls ", communicator->rank) + describe(collective.call); }

    uint64_t number_now() const { return phase == Phase::post ? communicator->next.load() : number; }

    // Returns a rank that has not got as far as this phase requires, or -1.
    int lacking() const {
        for (uint32_t each = 0; each < communicator->ranks; ++each) {
            if (!has_got_far_enough(communicator->member(each))) return static_cast<int>(each);
        }
        return -1;
    }
    bool has_got_far_enough(const Member& member) const {
        uint64_t at = number_now(), slot = at % slots;
        switch (phase) {
            case Phase::post: return at < slots || member.finished[slot] > at - slots;
            case Phase::take: return (collective.combine ? member.combined : member.posted)[slot] > at;
            default: return member.posted[slot] > at;
        }
    }

    void step() {
        Turn turn{*communicator, number};
        Member& self = communicator->self();
        uint64_t slot = number % slots;
        switch (phase) {
            case Phase::post:
                post();
                break;
            case Phase::combine:
                collective.combine(turn);
                self.combined[slot] = number + 1;
                communicator->ring_others();
                phase = Phase::take;
                break;
            default:
                collective.take(turn);
                self.finished[slot] = number + 1;
                communicator->ring_others();
                {
                    std::lock_guard lock(communicator->numbering);
                    communicator->give_back_slots();
                }
                phase = Phase::done;
        }
    }

    void post() {
        std::lock_guard lock(communicator->numbering);
        if (lacking() >= 0) return;  // another stream took the number for which the slot was free
        communicator->give_back_slots();
        uint64_t next = communicator->next;
        communicator->written[next % slots] = collective.bytes;
        // If it throws, this rank has not taken the number, so the others learn that the call with it fails.
        if (collective.put) collective.put(communicator->slot(communicator->rank, next));
        number = communicator->next++;
        Posting& posting = communicator->outbox(communicator->rank).posted[number % slots];
        posting.call = collective.call;
        if (!collective.counts.empty()) posting.counts = collective.counts[0];
        communicator->self().posted[number % slots] = number + 1;
        communicator->ring_others();
        phase = collective.combine ? Phase::combine : Phase::take;
    }

    // Fails if the ranks do not call the same. Every rank comes to the same result.
    void agree() {
        if (std::exchange(agreed, true)) return;
        const Call& first = communicator->outbox(0).posted[number % slots].call;
        std::string reason;
        for (uint32_t each = 1; each < communicator->ranks && reason.empty(); ++each) {
            const Call& other = communicator->outbox(each).posted[number % slots].call;
            if (std::memcmp(&first, &other, sizeof(Call)) == 0) continue;
            reason = "rank 0 calls " + describe(first) + ", and rank " + std::to_string(each) + " " + describe(other);
        }
        if (reason.empty() && collective.mismatch) reason = collective.mismatch({*communicator, number});
        if (!reason.empty()) fail_all(*communicator, number, disagreement, reason);
    }

    CommunicatorPointer communicator;
    Collective collective;
    Phase phase = Phase::post;
    uint64_t number = 0;
    bool agreed = false;
    Wait wait;
};

}  // namespace

int launch_collective(const CommunicatorPointer& communicator, aclrtStream stream, Launch launch,
                      Collective collective) {
    return launch_waiting(communicator, stream, std::move(launch),
                          std::make_shared<Execution>(communicator, std::move(collective)));
}

}  // namespace emulator
