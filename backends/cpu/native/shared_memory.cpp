// Collectives between the processes of one machine, over a segment of shared memory.
//
// A collective is a number of steps, which every rank counts. In step t, a rank writes into its buffer t % 2, publishes
// t, waits until all ranks have published t, and reads their buffers. A rank publishes t + 1 after it has read the
// buffers of t. When all have published t + 1, the buffers of t are free for t + 2.
#ifdef __linux__
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>

#include "elements.h"

namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kBuffer = 256 << 10;      // bytes of a buffer; longer tensors take several steps
constexpr int64_t kWhole = 32 << 10;        // bytes up to which every rank sums the whole tensor
constexpr auto kPause = std::chrono::microseconds(5);
constexpr auto kSpin = std::chrono::microseconds(100);
constexpr long kSleep = 50'000'000;         // ns after which the caller looks at the other ranks and at signals

enum Operation : int64_t { kAllReduce, kAllGather, kReduceScatter, kAllGatherRows };
enum Status : int { kDone, kWaiting, kBroken, kDiffers };
enum Broken : uint32_t { kIntact, kExplaining, kExplained };
constexpr int64_t kBytes[] = {4, 2, 2, 4, 8};  // of an element, by dtype: those of elements.h, int32 and int64

struct Call {  // what a rank was asked for; equal on all ranks
    int64_t operation, dtype, dimensions, shape[8];
};

struct alignas(128) Rank {
    std::atomic<uint32_t> published;  // the last step
    std::atomic<uint32_t> sleepers;   // ranks that sleep until this one publishes
    alignas(64) Call calls[2];
};

struct alignas(128) Segment {
    char token[16];                // written by the rank that made the segment; the others compare it
    std::atomic<uint32_t> broken;  // a value of Broken
    char reason[1004];             // UTF-8, with a zero at the end
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "a lock would not be shared between processes");
static_assert(sizeof(Segment) == 1024 && sizeof(Rank) % 128 == 0, "the layout is the same on all ranks");

int64_t segment_bytes(int64_t size) { return sizeof(Segment) + size * (sizeof(Rank) + 2 * kBuffer); }

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* limit) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, limit, nullptr, 0);
}

class Exchange {
   public:
    Exchange(char* memory, int rank, int size, bool crowded)
        : segment_(reinterpret_cast<Segment*>(memory)),
          ranks_(reinterpret_cast<Rank*>(memory + sizeof(Segment))),
          buffers_(memory + sizeof(Segment) + size * sizeof(Rank)),
          rank_(rank), size_(size), crowded_(crowded) {}

    // Starts a collective. `count` is the number of elements of x, or of the result for reduce_scatter; `width` is the
    // last dimension of x.
    Status begin(const Call& call, const void* x, void* out, int64_t count, int64_t width) {
        if (segment_->broken.load(std::memory_order_acquire)) return kBroken;
        call_ = call, x_ = static_cast<const char*>(x), out_ = static_cast<char*>(out);
        count_ = count, bytes_ = kBytes[call.dtype];
        width_ = call.operation == kAllGatherRows ? count : width;  // elements of a rank side by side in out
        offset_ = 0, gathers_ = published_ = false;
        parts_ = call.operation == kAllReduce && count * bytes_ > kWhole;
        return resume();
    }

    // Continues the collective after kWaiting.
    Status resume() {
        while (true) {
            if (!published_) write(), publish();
            for (; waits_for_ < size_; waits_for_++) {
                Status status = wait(ranks_[waits_for_]);
                if (status != kDone) return status;
            }
            read();
            published_ = false;
            if (parts_ && !gathers_) {
                gathers_ = true;
                continue;
            }
            gathers_ = false;
            offset_ += length();
            if (offset_ >= count_) return kDone;
        }
    }

    void fail(const char* reason) {
        uint32_t intact = kIntact;
        if (!segment_->broken.compare_exchange_strong(intact, kExplaining)) return;
        std::strncpy(segment_->reason, reason, sizeof(segment_->reason) - 1);
        segment_->broken.store(kExplained);
        for (int rank = 0; rank < size_; rank++) futex(ranks_[rank].published, FUTEX_WAKE, INT_MAX, nullptr);
    }

    const char* reason() const { return segment_->broken.load() == kExplained ? segment_->reason : ""; }
    bool waits_for(int rank) const { return published_ && !reached(ranks_[rank]); }
    const Call& other_call() const { return ranks_[waits_for_].calls[step_ % 2]; }
    int other_rank() const { return waits_for_; }

   private:
    char* buffer(int rank, uint32_t step) const { return buffers_ + (2 * rank + step % 2) * kBuffer; }
    bool reached(const Rank& rank) const {
        return int32_t(rank.published.load(std::memory_order_acquire) - step_) >= 0;
    }

    // The elements of this step; for reduce_scatter, of each rank's result.
    int64_t length() const {
        int64_t most = kBuffer / bytes_ / (call_.operation == kReduceScatter ? size_ : 1);
        return std::min(most, count_ - offset_);
    }
    int64_t part(int rank) const { return length() * rank / size_; }  // the first element that the rank sums

    void write() {
        char* mine = buffer(rank_, step_ + 1);
        int64_t bytes = length() * bytes_;
        if (call_.operation == kReduceScatter)
            for (int r = 0; r < size_; r++) std::memcpy(mine + r * bytes, x_ + (r * count_ + offset_) * bytes_, bytes);
        else if (!gathers_)  // Otherwise the sum is there already.
            std::memcpy(mine, x_ + offset_ * bytes_, bytes);
    }

    void publish() {
        Rank& mine = ranks_[rank_];
        mine.calls[++step_ % 2] = call_;
        published_ = true, waits_for_ = 0;
        mine.published.store(step_);
        if (mine.sleepers.load()) futex(mine.published, FUTEX_WAKE, INT_MAX, nullptr);
    }

    Status wait(Rank& other) {
        if (!reached(other)) {
            Status status = spin(other);
            if (status != kDone) return status;
        }
        return std::memcmp(&other.calls[step_ % 2], &call_, sizeof(Call)) ? kDiffers : kDone;
    }

    Status spin(Rank& other) {
        auto now = Clock::now(), yields = now + (crowded_ ? 0 * kSpin : kPause), sleeps = now + kSpin;
        for (int turn = 1; !reached(other); turn++) {
            if (segment_->broken.load(std::memory_order_acquire)) return kBroken;
            if (now < yields)
                relax();
            else
                sched_yield();  // The other rank may wait for this core.
            if (turn % 16 == 0) now = Clock::now();
            if (now < sleeps) continue;
            other.sleepers.fetch_add(1);
            uint32_t seen = other.published.load();
            timespec limit{0, kSleep};
            if (int32_t(seen - step_) < 0 && !segment_->broken.load())
                futex(other.published, FUTEX_WAIT, seen, &limit);
            other.sleepers.fetch_sub(1);
            if (!reached(other)) return segment_->broken.load() ? kBroken : kWaiting;
        }
        return kDone;
    }

    void read() {
        const int64_t count = length(), bytes = count * bytes_;
        char* out = out_ + offset_ * bytes_;
        if (call_.operation == kReduceScatter) {
            sum(out, rank_ * count, count);
        } else if (call_.operation == kAllGather || call_.operation == kAllGatherRows) {
            for (int r = 0; r < size_; r++) scatter_rows(buffer(r, step_), r);
        } else if (!parts_) {
            sum(out, 0, count);
        } else if (!gathers_) {
            int64_t first = part(rank_);
            sum(buffer(rank_, step_ + 1) + first * bytes_, first, part(rank_ + 1) - first);
        } else {
            for (int r = 0; r < size_; r++) {
                int64_t first = part(r) * bytes_, last = r + 1 == size_ ? bytes : part(r + 1) * bytes_;
                std::memcpy(out + first, buffer(r, step_) + first, last - first);
            }
        }
    }

    // Copies elements of rank r, from `offset_` on, to their place between those of other ranks in each row.
    void scatter_rows(const char* from, int r) {
        for (int64_t done = 0, count = length(); done < count;) {
            int64_t row = (offset_ + done) / width_, column = (offset_ + done) % width_;
            int64_t some = std::min(width_ - column, count - done);
            std::memcpy(out_ + ((row * size_ + r) * width_ + column) * bytes_, from + done * bytes_, some * bytes_);
            done += some;
        }
    }

    // out[i] is the sum over ranks, in their order, of element `first + i` of their buffers. It is the same whichever
    // rank computes it.
    void sum(char* out, int64_t first, int64_t count) {
        with_type(int(call_.dtype), [&](auto zero) {
            using T = decltype(zero);
            constexpr int64_t kBlock = 512;
            alignas(64) float total[kBlock];
            T* result = reinterpret_cast<T*>(out);
            for (int64_t begin = 0; begin < count; begin += kBlock) {
                const int64_t n = std::min(kBlock, count - begin);
                for (int r = 0; r < size_; r++) {
                    const T* from = reinterpret_cast<const T*>(buffer(r, step_)) + first + begin;
                    if (r == 0)
                        for (int64_t i = 0; i < n; i++) total[i] = float(from[i]);
                    else
                        for (int64_t i = 0; i < n; i++) total[i] += float(from[i]);
                }
                for (int64_t i = 0; i < n; i++) result[begin + i] = T(total[i]);
            }
        });
    }

    Segment* segment_;
    Rank* ranks_;
    char* buffers_;
    const int rank_, size_;
    const bool crowded_;  // more threads than cores: let others run while waiting
    uint32_t step_ = 0;   // the last published step
    // The present collective.
    Call call_{};
    const char* x_ = nullptr;
    char* out_ = nullptr;
    int64_t count_ = 0, width_ = 0, bytes_ = 4, offset_ = 0;
    bool parts_ = false;    // each rank sums its part, and in a second step all gather the parts
    bool gathers_ = false;  // in that second step
    bool published_ = false;
    int waits_for_ = 0;
};

}  // namespace

extern "C" {

int64_t exchange_bytes(int64_t size) { return segment_bytes(size); }

void* exchange_open(void* memory, int rank, int size, int crowded) {
    return new Exchange(static_cast<char*>(memory), rank, size, crowded);
}

void exchange_close(void* exchange) { delete static_cast<Exchange*>(exchange); }

int exchange_begin(void* exchange, const void* call, const void* x, void* out, int64_t count, int64_t width) {
    return static_cast<Exchange*>(exchange)->begin(*static_cast<const Call*>(call), x, out, count, width);
}

int exchange_resume(void* exchange) { return static_cast<Exchange*>(exchange)->resume(); }

void exchange_fail(void* exchange, const char* reason) { static_cast<Exchange*>(exchange)->fail(reason); }

const char* exchange_reason(void* exchange) { return static_cast<Exchange*>(exchange)->reason(); }

int exchange_waits_for(void* exchange, int rank) { return static_cast<Exchange*>(exchange)->waits_for(rank); }

// Writes the call of the rank that was given another one to `call`, and returns the rank.
int exchange_other(void* exchange, void* call) {
    auto& found = *static_cast<Exchange*>(exchange);
    std::memcpy(call, &found.other_call(), sizeof(Call));
    return found.other_rank();
}
}
#endif
