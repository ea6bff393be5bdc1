// What the kernels of attention read: that of few queries, and that of many, over a paged cache or without one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "elements.h"
#include "products.h"

struct Shape {
    int64_t sequences, tokens, heads, kv_heads, head_dim, value_dim, block_size, max_blocks;
    int64_t query_stride, query_head_stride;  // in elements
    float scale, softcap;  // no softcap if 0
    int causal;
    int64_t window;      // larger than any position for none
    int64_t work;        // a sequence with more queries times tokens may have many queries; if negative, each has
    const float* sinks;  // a score of each head without a value, or null
    int64_t key_stride, key_head_stride, value_stride, value_head_stride;  // in elements

    // Whether a sequence has so many queries that packing its keys and values pays.
    bool many(const int32_t* starts, const int32_t* lengths, int64_t sequence) const {
        const int64_t queries = starts[sequence + 1] - starts[sequence];
        return work < 0 || (queries >= 8 && queries * lengths[sequence] > work);
    }
};

// Keys or values. Their numbers are of T, or quantized, with a scale of each row of `dim`.
template <class T>
struct Pages {
    const void* numbers;
    const float* scales;  // or null
    int float8;           // whether the quantized numbers are float8 (e4m3), or else int8
    int64_t dim;

    // Writes the row at a multiple of `dim`.
    void widen(int64_t at, T* to) const {
        const uint8_t* from = static_cast<const uint8_t*>(numbers) + at;
        const float scale = scales[at / dim];
        int64_t i = 0;
        for (; i + kLanes <= dim; i += kLanes) {
            const Lanes values = numbers_of(load<Bytes>(from + i)) * scale;
            if constexpr (Product<T>::kStep == 2 * kLanes)
                Product<T>::round(values, to + i);
            else
                narrow(values, to + i);
        }
        if (i == dim) return;
        Bytes last = {};
        std::memcpy(&last, from + i, dim - i);
        const Lanes values = numbers_of(last) * scale;
        for (int64_t place = 0; i + place < dim; place++) to[i + place] = T(values[place]);
    }

  private:
    using Bytes = uint8_t __attribute__((vector_size(kLanes)));
    using Signed = int8_t __attribute__((vector_size(kLanes)));

    Lanes numbers_of(Bytes bytes) const {
        if (!float8) return __builtin_convertvector(__builtin_convertvector(Signed(bytes), Ints), Lanes);
        // The exponent and fraction of a float8 are those of a float32 of 2**-120 times its size.
        const Ints bits = __builtin_convertvector(bytes, Ints), size = bits & 0x7f;
        const Lanes values = Lanes(size << 20 | (bits & 0x80) << 24) * 0x1p120f;
        return size == 0x7f ? Lanes{} + std::numeric_limits<float>::quiet_NaN() : values;
    }
};

struct Span {
    int64_t begin, end;  // the positions that a token sees
};

inline Span visible(const Shape& shape, int64_t position, int64_t length) {
    const int64_t end = std::min(shape.causal ? position + 1 : position + shape.window, length);
    const int64_t begin = std::max<int64_t>(0, position - shape.window + 1);
    return {begin, std::max(begin, end)};
}

// Scales and caps scores.
inline void adjust(const Shape& shape, float* scores, int64_t count) {
    for (int64_t i = 0; i < count; i++) scores[i] *= shape.scale;
    if (shape.softcap == 0) return;
    const float share = 1 / shape.softcap;
    for (int64_t i = 0; i < count; i++) scores[i] = shape.softcap * hyperbolic_tangent(scores[i] * share);
}

// The positions whose keys a call is given, in order: all of them, or a part, and calls with the earlier parts come first.
struct KeyRange {
    int64_t begin = 0, end = std::numeric_limits<int64_t>::max();
};

// Of rows, over the keys so far: sums of weighted values and of weights, which are relative to the largest scores.
struct RowSums {
    std::vector<float> values, weights, largest;
};

// Writes the rows of the sequences with many queries. Without a block table, a sequence's keys are beside its queries, or
// are those of a range. Calls for the ranges of one sequence pass on what is `carried`.
template <class T>
void attend_prompts(const Shape& shape, const T* query, const Pages<T>& keys, const Pages<T>& values,
                    const int32_t* block_table, const int32_t* starts, const int32_t* lengths, T* output,
                    const KeyRange& range = {}, std::vector<RowSums>* carried = nullptr);
