// Products of rows of a matrix with other rows: 4 by up to 4 dots at a time, in registers. Sums are float32.
//
// Both have unit stride along the summed dimension, as weights [out_features, in_features] and activations have. The
// matrix is read in place; the other rows are packed in groups, because rows that are a power of two apart would evict
// one another from the CPU cache. A dot does not depend on the number of rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "elements.h"
#include "vector.h"

// The arithmetic of element type T: products of Operands in vectors of kStep elements.
template <class T>
struct Product {
    using Operand = float;
    using Vector = Lanes;
    static constexpr int kStep = kLanes;
    static Vector widened(const T* from) { return wide(from); }
    static Vector repeated(const Operand* from) { return Lanes{} + *from; }
    static void add(Lanes& sum, const Vector& left, const Vector& right) { sum += left * right; }
};

#ifdef __AVX512BF16__
template <>
struct Product<bfloat16> {
    using Operand = bfloat16;
    using Vector = __m512bh;
    static constexpr int kStep = 2 * kLanes;
    static Vector widened(const bfloat16* from) { return load<Vector>(from); }
    // Writes the elements of two rows by turns.
    static void interleave(const bfloat16* first, const bfloat16* second, bfloat16* to) {
        const __m512i low = _mm512_cvtepu16_epi32(load<__m256i>(first));
        const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(second)), 16);
        _mm512_storeu_si512(to, _mm512_or_epi32(low, high));
    }
    // Rounds faster than `narrow`, but values below the normal ones to 0.
    static void round(Lanes values, bfloat16* to) {
        const __m256bh rounded = _mm512_cvtneps_pbh(__m512(values));
        std::memcpy(to, &rounded, sizeof(rounded));
    }
    static Vector repeated(const bfloat16* from) { return Vector(_mm512_set1_epi32(load<int32_t>(from))); }
    static void add(Lanes& sum, const Vector& left, const Vector& right) {
        sum = Lanes(_mm512_dpbf16_ps(__m512(sum), left, right));
    }
};
#endif

template <class T>
using Operand = typename Product<T>::Operand;

constexpr int kSecond = 2;  // prefetches into a core's second cache: its first has fewer at a time
constexpr int kRows = 4;                              // of the matrix, per tile
constexpr int kGroup = kRegisters >= 32 ? 4 : 3;      // of the others, so that sums stay in registers
template <int M>
constexpr int kDots = int(up(kRows * M, kLanes));  // sums of a tile, filled up to whole vectors

// Packs `count` rows in groups, vector by vector, filled up with zeros. Returns the elements of a group.
template <class T, int Group>
inline int64_t pack(const T* const* rows, int64_t count, int64_t width, std::vector<Operand<T>>& packed) {
    constexpr int64_t kStep = Product<T>::kStep;
    const int64_t steps = (width + kStep - 1) / kStep, whole = width / kStep, group = steps * kStep * Group;
    packed.resize((count + Group - 1) / Group * group);
    for (int64_t row = 0; row < count; row++) {
        Operand<T>* to = packed.data() + row / Group * group + row % Group * kStep;
        for (int64_t step = 0; step < whole; step++, to += Group * kStep) {
            const auto vector = Product<T>::widened(rows[row] + step * kStep);
            std::memcpy(to, &vector, sizeof(vector));
        }
        if (whole < steps)
            for (int64_t i = 0; i < kStep; i++) {
                const int64_t at = whole * kStep + i;
                to[i] = at < width ? Operand<T>(rows[row][at]) : Operand<T>(0.0f);
            }
    }
    return group;
}

// Writes rows[r] . others[m] to dots[m * kRows + r], for M others. Packed: whether the rows are packed, or follow one
// another. Ahead: whether to prefetch as many elements from `next`. A call keeps the registers free for the sums.
template <class T, int M, bool Ahead, bool Packed, class Row>
__attribute__((noinline)) void tile(const Row* rows, const Operand<T>* others, int64_t width, const Row* next,
                                    float* dots) {
    using P = Product<T>;
    Lanes sums[kDots<M>] = {};
    for (int64_t i = 0; i < width; i += P::kStep, others += kGroup * P::kStep) {
        typename P::Vector right[M];
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
            right[m] = load<typename P::Vector>(others + m * P::kStep);
            keep(right[m]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; r++) {
            if (Ahead && r * P::kStep * sizeof(Row) % 64 == 0) __builtin_prefetch(next + i * kRows + r * P::kStep, 0, kSecond);
            typename P::Vector left;
            if constexpr (Packed)
                left = load<typename P::Vector>(rows + i * kRows + r * P::kStep);
            else
                left = P::widened(rows + r * width + i);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) P::add(sums[m * kRows + r], left, right[m]);
        }
    }
    write_sums<kDots<M>>(sums, dots);
}

template <class T, bool Ahead, bool Packed, int M = kGroup, class... Arguments>
inline void tile_of(int64_t count, Arguments... arguments) {
    if constexpr (M > 1)
        if (count < M) return tile_of<T, Ahead, Packed, M - 1>(count, arguments...);
    tile<T, M, Ahead, Packed>(arguments...);
}

constexpr int64_t kOthers = 64;  // others at a time
constexpr int64_t kBlock = 32;   // rows at a time; they stay in the CPU cache for all groups of others
constexpr int64_t kNear = 8;     // of these, so many are widened at a time
// Others, for more of which widening rows in a pass of its own is faster: where registers are few.
constexpr int64_t kWorthWidening = kRegisters >= 32 ? kOthers : 4 * kGroup;

// Multiplies up to kBlock rows of a matrix, contiguous, with up to kOthers others.
template <class T>
class Multiplication {
  public:
    // Sets the others, which may be of a type that is widened to T.
    template <class U>
    void pack_others(const U* const* others, int64_t count, int64_t width) {
        static_assert(std::is_same_v<Operand<U>, Operand<T>>);
        count_ = count, width_ = width;
        group_ = pack<U, kGroup>(others, count, width, others_);
    }

    // Writes rows[r] . others[m] to sums[m * kBlock + r].
    void run(const T* rows, int64_t count, float* sums) {
        // Rows that are widened to be multiplied are widened once for all groups of others.
        if constexpr (kWorthWidening < kOthers && !std::is_same_v<T, Operand<T>>)
            if (count_ > kWorthWidening) return run_widened(rows, count, sums);
        for (int64_t m = 0; m < count_; m += kGroup)
            for (int64_t row = 0; row < count; row += kRows)
                multiply(rows + row * width_, std::min<int64_t>(kRows, count - row), m,
                         m == 0 && row + 2 * kRows <= count, sums + row);
    }

  private:
    void run_widened(const T* rows, int64_t count, float* sums) {
        for (int64_t first = 0; first < count; first += kNear) {
            const int64_t taken = std::min(kNear, count - first), whole = up(taken, kRows);
            const T* pointers[kNear];
            for (int64_t r = 0; r < whole; r++) pointers[r] = rows + (first + std::min(r, taken - 1)) * width_;
            const int64_t size = pack<T, kRows>(pointers, whole, width_, rows_);
            for (int64_t m = 0; m < count_; m += kGroup)
                for (int64_t row = 0; row < taken; row += kRows) {
                    const Operand<T>* from = rows_.data() + row / kRows * size;
                    write<false, true>(m, from, from, sums + first + row);
                }
        }
    }

    void multiply(const T* first, int64_t rows, int64_t m, bool ahead, float* sums) {
        if (rows == kRows && width_ % Product<T>::kStep == 0)
            return ahead ? write<true, false>(m, first, first + kRows * width_, sums)
                         : write<false, false>(m, first, first, sums);
        const T* pointers[kRows];  // beyond the end, the last row again; its dots are not used
        for (int64_t r = 0; r < kRows; r++) pointers[r] = first + std::min(r, rows - 1) * width_;
        pack<T, kRows>(pointers, kRows, width_, rows_);
        const Operand<T>* packed = rows_.data();
        write<false, true>(m, packed, packed, sums);
    }

    // Multiplies kRows rows with the group of others from `m` on.
    template <bool Ahead, bool Packed, class Row>
    void write(int64_t m, const Row* rows, const Row* next, float* sums) {
        const int64_t taken = std::min<int64_t>(kGroup, count_ - m);
        float dots[kDots<kGroup>];
        tile_of<T, Ahead, Packed>(taken, rows, others_.data() + m / kGroup * group_, width_, next, dots);
        for (int64_t i = 0; i < taken; i++)
            std::memcpy(sums + (m + i) * kBlock, dots + i * kRows, kRows * sizeof(float));
    }

    std::vector<Operand<T>> others_, rows_;
    int64_t count_, width_, group_;
};
