// Units of work that the threads of a parallel region claim in order, ever fewer at a time. A thread claims the next
// ones before it has done its own, so that it can fetch their memory meanwhile.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

class Claims {
  public:
    Claims(int64_t units, int64_t threads) : units_(units), threads_(threads) {}

    // Runs body(unit, following) for the units that this thread claims. `following` is the one that it runs next; the
    // last one follows itself.
    template <class Body>
    void run(Body body) {
        Range mine = take(), next = take();
        for (; mine.first < mine.end; mine = next, next = take())
            for (int64_t unit = mine.first; unit < mine.end; unit++) {
                const int64_t beyond = next.first < next.end ? next.first : unit;
                body(unit, unit + 1 < mine.end ? unit + 1 : beyond);
            }
    }

  private:
    struct Range {
        int64_t first, end;
    };

    Range take() {
        int64_t first = taken_.load(std::memory_order_relaxed), size;
        do {
            if (first >= units_) return {units_, units_};
            size = std::max<int64_t>(1, (units_ - first) / (2 * threads_));
        } while (!taken_.compare_exchange_weak(first, first + size, std::memory_order_relaxed));
        return {first, first + size};
    }

    std::atomic<int64_t> taken_{0};
    const int64_t units_, threads_;
};
