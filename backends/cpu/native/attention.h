// What the kernels of attention read: that of few queries, and that of many, over a paged cache or without one.
#pragma once

#include <algorithm>
#include <cstdint>

#include "elements.h"

struct Shape {
    int64_t sequences, tokens, heads, kv_heads, head_dim, block_size, max_blocks;
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

// Writes the rows of the sequences with many queries. Without a block table, a sequence's keys are beside its queries.
template <class T>
void attend_prompts(const Shape& shape, const T* query, const T* keys, const T* values, const int32_t* block_table,
                    const int32_t* starts, const int32_t* lengths, T* output);
