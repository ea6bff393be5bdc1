// What the adapters of tokens add to the output of a projection. Each adapter's factors are read once for two tokens that
// follow one another and have it, in place. Sums are float32, and a token's do not depend on the other tokens.
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "elements.h"
#include "replay.h"
#include "vector.h"

namespace {

constexpr int64_t kGrain = 1 << 16;   // products; for fewer, starting threads costs more than it gains
constexpr int64_t kTokens = 2;        // that share an adapter and are multiplied together
constexpr int64_t kRowsOfA = 4;       // whose sums are in registers
constexpr int64_t kVectors = 4;       // of the output, whose sums are in registers
constexpr int64_t kColumns = 512;     // of a unit of work

// A run of the output's features, and the part of A that it reads.
struct Run {
    int64_t part, size;
};

struct Lora {
    int64_t tokens, in, out, slots, parts, rank;
    int64_t rows() const { return parts * rank; }
};

// Tokens [first, first + count) with the adapter `slot`; -1 for none.
struct Group {
    int64_t first, count, slot;
};

// Writes the products of `M` tokens with `rows` rows of A.
template <class T, int M>
void inner_products(const Lora& lora, const float* x, const T* a, int64_t row, int64_t rows, float* inner) {
    const T* from[kRowsOfA];
    for (int64_t i = 0; i < kRowsOfA; i++) from[i] = a + (row + std::min(i, rows - 1)) * lora.in;
    Lanes sums[M][kRowsOfA] = {};
    int64_t at = 0;
    for (; at + kLanes <= lora.in; at += kLanes) {
        Lanes right[M];
        for (int m = 0; m < M; m++) right[m] = load<Lanes>(x + m * lora.in + at);
#pragma GCC unroll 4
        for (int i = 0; i < kRowsOfA; i++) {
            const Lanes left = wide(from[i] + at);
            for (int m = 0; m < M; m++) sums[m][i] += left * right[m];
        }
    }
    for (int m = 0; m < M; m++) {
        for (int64_t i = 0; i < rows; i++) {
            float sum = 0;
            for (int lane = 0; lane < kLanes; lane++) sum += sums[m][i][lane];
            for (int64_t rest = at; rest < lora.in; rest++) sum += x[m * lora.in + rest] * float(from[i][rest]);
            inner[m * lora.rows() + row + i] = sum;
        }
    }
}

// Writes the outputs of `M` tokens in columns [first, last) of one run, whose factors begin at `inner`.
template <class T, int M>
void outer_products(const Lora& lora, const float* inner, const T* b, const T* output, int64_t first, int64_t last,
                    T* y) {
    int64_t column = first;
    for (; column + kVectors * kLanes <= last; column += kVectors * kLanes) {
        Lanes sums[M][kVectors];
        for (int m = 0; m < M; m++)
            for (int v = 0; v < kVectors; v++) sums[m][v] = Lanes{};
        for (int64_t r = 0; r < lora.rank; r++) {
            const T* row = b + r * lora.out + column;
            __builtin_prefetch(row + 4 * kVectors * kLanes);
            Lanes factor[M];
            for (int m = 0; m < M; m++) factor[m] = Lanes{} + inner[m * lora.rows() + r];
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) {
                const Lanes right = wide(row + v * kLanes);
                for (int m = 0; m < M; m++) sums[m][v] += factor[m] * right;
            }
        }
        for (int m = 0; m < M; m++)
            for (int v = 0; v < kVectors; v++) {
                const int64_t place = m * lora.out + column + v * kLanes;
                narrow(wide(output + place) + sums[m][v], y + place);
            }
    }
    for (; column < last; column++) {
        for (int m = 0; m < M; m++) {
            float sum = 0;
            for (int64_t r = 0; r < lora.rank; r++)
                sum += inner[m * lora.rows() + r] * float(b[r * lora.out + column]);
            y[m * lora.out + column] = T(float(output[m * lora.out + column]) + sum);
        }
    }
}

template <class T>
const float* widened(const T* x, int64_t count, std::vector<float>& held) {
    if constexpr (std::is_same_v<T, float>) return x;
    if (int64_t(held.size()) < count) held.resize(count);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        const Lanes values = wide(x + i);
        std::memcpy(held.data() + i, &values, sizeof(values));
    }
    for (; i < count; i++) held[i] = float(x[i]);
    return held.data();
}

template <class T>
void add(const Lora& lora, const T* output, const T* x, const T* a, const T* b, const std::vector<Group>& groups,
         const Run* runs, int64_t num_runs, T* y) {
    thread_local std::vector<float> held, products;
    const float* wide_x = widened(x, lora.tokens * lora.in, held);
    if (int64_t(products.size()) < lora.tokens * lora.rows()) products.resize(lora.tokens * lora.rows());
    float* inner = products.data();
    const int64_t count = groups.size(), rows = lora.rows(), blocks = (rows + kRowsOfA - 1) / kRowsOfA;
    const int64_t columns = (lora.out + kColumns - 1) / kColumns;
    const bool parallel = lora.tokens * (rows * lora.in + lora.rank * lora.out) > kGrain;
#pragma omp parallel if (parallel)
    {
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < count * blocks; unit++) {
            const Group& group = groups[unit / blocks];
            if (group.slot < 0) continue;
            const int64_t row = unit % blocks * kRowsOfA, taken = std::min(kRowsOfA, rows - row);
            const float* from = wide_x + group.first * lora.in;
            const T* own = a + group.slot * rows * lora.in;
            float* to = inner + group.first * rows;
            if (group.count == kTokens)
                inner_products<T, kTokens>(lora, from, own, row, taken, to);
            else
                inner_products<T, 1>(lora, from, own, row, taken, to);
        }
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < count * columns; unit++) {
            const Group& group = groups[unit / columns];
            const int64_t first = unit % columns * kColumns, last = std::min(lora.out, first + kColumns);
            const T* from = output + group.first * lora.out;
            T* to = y + group.first * lora.out;
            if (group.slot < 0) {
                for (int64_t m = 0; m < group.count; m++)
                    std::copy(from + m * lora.out + first, from + m * lora.out + last, to + m * lora.out + first);
                continue;
            }
            const T* own = b + group.slot * lora.rank * lora.out;
            int64_t start = 0;
            for (int64_t run = 0; run < num_runs; start += runs[run].size, run++) {
                const int64_t begin = std::max(first, start), end = std::min(last, start + runs[run].size);
                if (begin >= end) continue;
                const float* factors = inner + group.first * rows + runs[run].part * lora.rank;
                if (group.count == kTokens)
                    outer_products<T, kTokens>(lora, factors, own, from, begin, end, to);
                else
                    outer_products<T, 1>(lora, factors, own, from, begin, end, to);
            }
        }
    }
}

}  // namespace

// Returns the number of the first token whose slot there is not, or 0.
extern "C" int64_t add_lora(const void* output, const void* x, const void* a, const void* b, const int32_t* slots,
                            const int64_t* runs, void* y, int dtype, int64_t tokens, int64_t in, int64_t out,
                            int64_t num_slots, int64_t parts, int64_t rank, int64_t num_runs) {
    thread_local std::vector<Group> groups;
    groups.clear();
    for (int64_t token = 0; token < tokens; token++) {
        const int64_t slot = slots[token];
        if (slot < -1 || slot >= num_slots) return token + 1;
        if (!groups.empty() && groups.back().slot == slot && groups.back().count < kTokens)
            groups.back().count++;
        else
            groups.push_back({token, 1, slot});
    }
    const Lora lora{tokens, in, out, num_slots, parts, rank};
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        add(lora, static_cast<const T*>(output), static_cast<const T*>(x), static_cast<const T*>(a),
            static_cast<const T*>(b), groups, reinterpret_cast<const Run*>(runs), num_runs, static_cast<T*>(y));
    });
    return 0;
}
REPLAYABLE(add_lora)
