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
    static void add(Lanes& sum, const Vector& left, const Vector& right) { add_product(sum, left, right); }
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

constexpr int kRows = 4;                          // of the matrix, per tile
constexpr int kGroup = kRegisters >= 32 ? 4 : 3;  // of the others, so that sums stay in registers
template <int M>
constexpr int kDots = int(up(kRows * M, kLanes));  // sums of a tile, filled up to whole vectors

// Vectors that a tile takes of a row at once. Where bfloat16 is widened, a word has two elements, the first of which a
// shift widens and the second a mask: the packed rows then have the first ones of kLanes words, and the second ones.
template <class T>
constexpr int kParts = std::is_same_v<T, bfloat16> && std::is_same_v<Operand<T>, float> ? 2 : 1;
template <class T>
constexpr int64_t kTaken = kParts<T> * Product<T>::kStep;  // elements

constexpr Words kSecondOfWord = Words{} + 0xffff0000;

// Returns a part of kTaken elements.
template <class T>
inline typename Product<T>::Vector part_of(const T* from, int part) {
    if constexpr (kParts<T> == 1) return Product<T>::widened(from);
    if constexpr (kParts<T> == 2) {
        if (!part) return Lanes(load<Words>(from) << 16);
        const Words* mask = &kSecondOfWord;
        asm("" : "+r"(mask));  // read anew, because no register is left for it
        return Lanes(load<Words>(from) & *mask);
    }
}

// Packs rows for tiles of rows of T: vector by vector, filled up with zeros to a multiple of kTaken.
template <class T, class U>
inline void pack(const U* const* rows, int64_t count, int64_t width, Operand<T>* packed) {
    constexpr int64_t kStep = Product<T>::kStep;
    for (int64_t row = 0; row < count; row++) {
        Operand<T>* to = packed + row * kStep;
        for (int64_t at = 0; at < width; at += kTaken<T>) {
            const U* from = rows[row] + at;
            U filled[kTaken<T>];
            if (at + kTaken<T> > width) {
                std::fill(std::copy(from, rows[row] + width, filled), filled + kTaken<T>, U(0.0f));
                from = filled;
            }
            for (int part = 0; part < kParts<T>; part++, to += count * kStep) {
                const auto vector = [&] {
                    if constexpr (std::is_same_v<T, U>)
                        return part_of(from, part);
                    else
                        return Product<U>::widened(from);
                }();
                std::memcpy(to, &vector, sizeof(vector));
            }
        }
    }
}

// Writes rows[r] . others[m] to dots[m * kRows + r], for M others. Packed: whether the rows are packed, or follow one
// another. Fetches `ahead` bytes of `next` with each vector into the core's second cache; its first has fewer lines under
// way. A call keeps the registers free for the sums.
template <class T, int M, bool Packed, class Row>
__attribute__((noinline)) void tile(const Row* rows, const Operand<T>* others, int64_t width, const char* next,
                                    int64_t ahead, float* dots) {
    using P = Product<T>;
    Lanes sums[kRows * M] = {};
    for (int64_t i = 0; i < width; i += kTaken<T>, next += ahead) {
        for (int64_t line = 0; line < ahead; line += 64) __builtin_prefetch(next + line, 0, 2);
#pragma GCC unroll 2
        for (int part = 0; part < kParts<T>; part++, others += M * P::kStep) {
            typename P::Vector right[M];
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) {
                right[m] = load<typename P::Vector>(others + m * P::kStep);
                keep(right[m]);
            }
#pragma GCC unroll 4
            for (int r = 0; r < kRows; r++) {
                typename P::Vector left;
                if constexpr (Packed)
                    left = load<typename P::Vector>(rows + i * kRows + (part * kRows + r) * P::kStep);
                else
                    left = part_of(rows + r * width + i, part);
                keep(left);
#pragma GCC unroll 4
                for (int m = 0; m < M; m++) P::add(sums[m * kRows + r], left, right[m]);
            }
        }
    }
    Lanes all[kDots<M>] = {};
    std::memcpy(all, sums, sizeof(sums));
    write_sums<kDots<M>>(all, dots);
}

template <class T, bool Packed, int M = kGroup, class... Arguments>
inline void tile_of(int64_t count, Arguments... arguments) {
    if constexpr (M > 1)
        if (count < M) return tile_of<T, Packed, M - 1>(count, arguments...);
    tile<T, M, Packed>(arguments...);
}

constexpr int64_t kOthers = 64;  // others at a time
constexpr int64_t kBlock = 32;   // rows at a time; they stay in the CPU cache for all groups of others

// Multiplies up to kBlock rows of a matrix, contiguous, with up to kOthers others.
template <class T>
class Multiplication {
  public:
    // Sets the others, which may be of a type that is widened to T.
    template <class U>
    void pack_others(const U* const* others, int64_t count, int64_t width) {
        static_assert(std::is_same_v<Operand<U>, Operand<T>>);
        count_ = count, width_ = width, groups_ = (count + kGroup - 1) / kGroup, size_ = up(width, kTaken<T>) * kGroup;
        others_.resize(groups_ * size_);
        for (int64_t group = 0; group < groups_; group++)
            pack<T>(others + first_of(group), first_of(group + 1) - first_of(group), width, others_.data() + group * size_);
    }

    // Writes rows[r] . others[m] to sums[m * kBlock + r]. Meanwhile fetches as many rows from `next` on.
    void run(const T* rows, int64_t count, float* sums, const T* next) {
        // Each group fetches its share, with each vector so many bytes.
        const int64_t share = kTaken<T> * kRows * int64_t(sizeof(T)) / groups_, vectors = width_ / kTaken<T>;
        for (int64_t group = 0; group < groups_; group++)
            for (int64_t row = 0; row < count; row += kRows) {
                const char* ahead = reinterpret_cast<const char*>(next + row * width_) + group * vectors * share;
                multiply(rows + row * width_, std::min<int64_t>(kRows, count - row), group, ahead, share, sums + row);
            }
    }

  private:
    // Groups are of like size: a tile with one other only waits for its sums.
    int64_t first_of(int64_t group) const { return group * count_ / groups_; }

    void multiply(const T* first, int64_t rows, int64_t group, const char* ahead, int64_t share, float* sums) {
        if (rows == kRows && width_ % kTaken<T> == 0) return write<false>(first, group, ahead, share, sums);
        const T* pointers[kRows];  // beyond the end, the last row again; its dots are not used
        for (int64_t r = 0; r < kRows; r++) pointers[r] = first + std::min(r, rows - 1) * width_;
        rows_.resize(up(width_, kTaken<T>) * kRows);
        pack<T>(pointers, kRows, width_, rows_.data());
        write<true>(static_cast<const Operand<T>*>(rows_.data()), group, ahead, share, sums);
    }

    // Multiplies kRows rows with a group of others.
    template <bool Packed, class Row>
    void write(const Row* rows, int64_t group, const char* ahead, int64_t share, float* sums) {
        const int64_t first = first_of(group), taken = first_of(group + 1) - first;
        float dots[kDots<kGroup>];
        tile_of<T, Packed>(taken, rows, others_.data() + group * size_, width_, ahead, share, dots);
        for (int64_t i = 0; i < taken; i++)
            std::memcpy(sums + (first + i) * kBlock, dots + i * kRows, kRows * sizeof(float));
    }

    Buffer<Operand<T>> others_, rows_;
    int64_t count_, width_, groups_, size_;  // of the packed elements of a group
};
