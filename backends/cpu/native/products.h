// Products of rows of a matrix with other rows: 4 by up to 4 dots at a time, in registers. Sums are float32.
//
// Both have unit stride along the summed dimension, as weights [out_features, in_features] and activations have. The
// matrix is read in place; the other rows are packed in groups of 4, because rows that are a power of two apart would
// evict one another from the CPU cache. A dot does not depend on the number of rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "elements.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

using Lanes = float __attribute__((vector_size(64)));
constexpr int kLanes = 16;

template <class V, class T>
inline V load(const T* from) {
    V value;
    std::memcpy(&value, from, sizeof(V));
    return value;
}

// Returns 16 elements in float32.
template <class T>
inline Lanes wide(const T* from) {
#ifdef __AVX512F__
    if constexpr (sizeof(T) == 2) {
        const __m256i narrow = load<__m256i>(from);
        if constexpr (std::is_same_v<T, float16>) return Lanes(_mm512_maskz_cvtph_ps(0xffff, narrow));
        return Lanes(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
    }
#endif
    Lanes values;
    for (int i = 0; i < kLanes; i++) values[i] = float(from[i]);
    return values;
}

// Rounds 16 elements to nearest even.
template <class T>
inline void narrow(Lanes values, T* to) {
#ifdef __AVX512F__
    if constexpr (std::is_same_v<T, float16>) {
        const __m256i rounded =
            _mm512_maskz_cvtps_ph(0xffff, __m512(values), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        std::memcpy(to, &rounded, sizeof(rounded));
        return;
    }
#endif
    for (int i = 0; i < kLanes; i++) to[i] = T(values[i]);
}

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

constexpr int kRows = 4;  // of the matrix, and of the others, per tile

// Returns the sum of each of 16 vectors, the sum of vector i in lane i.
template <class V>
inline V sums_of(const V* v) {
    V pairs[8], fours[4], eights[2];
    for (int i = 0; i < 8; i++) {
        const V &a = v[2 * i], &b = v[2 * i + 1];
        pairs[i] = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
                   __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
    for (int i = 0; i < 4; i++) {
        const V &a = pairs[2 * i], &b = pairs[2 * i + 1];
        fours[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                   __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    for (int i = 0; i < 2; i++) {
        const V &a = fours[2 * i], &b = fours[2 * i + 1];
        eights[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
                    __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
    const V &a = eights[0], &b = eights[1];
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

// Packs `count` rows in groups of 4, vector by vector, filled up with zeros. Returns the elements of a group.
template <class T>
inline int64_t pack(const T* const* rows, int64_t count, int64_t width, std::vector<Operand<T>>& packed) {
    constexpr int64_t kStep = Product<T>::kStep;
    const int64_t steps = (width + kStep - 1) / kStep, whole = width / kStep, group = steps * kStep * kRows;
    packed.resize((count + kRows - 1) / kRows * group);
    for (int64_t row = 0; row < count; row++) {
        Operand<T>* to = packed.data() + row / kRows * group + row % kRows * kStep;
        for (int64_t step = 0; step < whole; step++, to += kRows * kStep) {
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

// Returns rows[r] . others[m] in lane m * kRows + r, for M others. Packed: whether the rows are packed, or follow one
// another. Ahead: whether to prefetch as many elements from `next`. A call keeps the registers free for the sums.
template <class T, int M, bool Ahead, bool Packed, class Row>
__attribute__((noinline)) Lanes tile(const Row* rows, const Operand<T>* others, int64_t width, const Row* next) {
    using P = Product<T>;
    Lanes sums[kRows * kRows] = {};
    for (int64_t i = 0; i < width; i += P::kStep, others += kRows * P::kStep) {
        typename P::Vector left[kRows];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; r++) {
            if constexpr (Ahead) __builtin_prefetch(next + i * kRows + r * P::kStep);
            if constexpr (Packed)
                left[r] = load<typename P::Vector>(rows + i * kRows + r * P::kStep);
            else
                left[r] = P::widened(rows + r * width + i);
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
            const auto right = load<typename P::Vector>(others + m * P::kStep);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; r++) P::add(sums[m * kRows + r], left[r], right);
        }
    }
    return sums_of(sums);
}

template <class T, bool Ahead, bool Packed, class Row>
inline Lanes tile_of(int64_t count, const Row* rows, const Operand<T>* others, int64_t width, const Row* next) {
    switch (count) {
        case 1:
            return tile<T, 1, Ahead, Packed>(rows, others, width, next);
        case 2:
            return tile<T, 2, Ahead, Packed>(rows, others, width, next);
        case 3:
            return tile<T, 3, Ahead, Packed>(rows, others, width, next);
        default:
            return tile<T, 4, Ahead, Packed>(rows, others, width, next);
    }
}

constexpr int64_t kOthers = 64;  // others at a time
constexpr int64_t kBlock = 32;   // rows at a time; they stay in the CPU cache for all groups of others

// Multiplies up to kBlock rows of a matrix, contiguous, with up to kOthers others.
template <class T>
class Multiplication {
  public:
    // Sets the others.
    void pack_others(const T* const* others, int64_t count, int64_t width) {
        count_ = count, width_ = width;
        group_ = pack<T>(others, count, width, others_);
    }

    // Writes rows[r] . others[m] to sums[m * kBlock + r].
    void run(const T* rows, int64_t count, float* sums) {
        for (int64_t m = 0; m < count_; m += kRows) {
            const Operand<T>* group = others_.data() + m / kRows * group_;
            const int64_t taken = std::min<int64_t>(kRows, count_ - m);
            for (int64_t row = 0; row < count; row += kRows) {
                float dots[kLanes];
                const Lanes result = multiply(rows + row * width_, std::min<int64_t>(kRows, count - row), group, taken,
                                              m == 0 && row + 2 * kRows <= count);
                std::memcpy(dots, &result, sizeof(dots));
                for (int64_t i = 0; i < taken; i++)
                    std::memcpy(sums + (m + i) * kBlock + row, dots + i * kRows, kRows * sizeof(float));
            }
        }
    }

  private:
    Lanes multiply(const T* first, int64_t rows, const Operand<T>* group, int64_t taken, bool ahead) {
        if (rows == kRows && width_ % Product<T>::kStep == 0)
            return ahead ? tile_of<T, true, false>(taken, first, group, width_, first + kRows * width_)
                         : tile_of<T, false, false>(taken, first, group, width_, first);
        const T* pointers[kRows];  // beyond the end, the last row again; its dots are not used
        for (int64_t r = 0; r < kRows; r++) pointers[r] = first + std::min(r, rows - 1) * width_;
        pack<T>(pointers, kRows, width_, rows_);
        return tile_of<T, false, true>(taken, rows_.data(), group, width_, rows_.data());
    }

    std::vector<Operand<T>> others_, rows_;
    int64_t count_, width_, group_;
};
