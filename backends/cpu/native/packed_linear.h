// A product of few rows with a weight in oneDNN's packed layout; see packed_linear.cpp.
#pragma once

#include <cstdint>

#include "elements.h"

constexpr int64_t kInBlock = 32;  // in_features are filled up to a multiple

struct PackedProduct {
    const bfloat16* x;
    const uint32_t* weight;
    const bfloat16* bias;  // or null
    bfloat16* y;
    int64_t rows, width, out, block, x_stride;
    int64_t pairs, block_pairs;  // of in_features: those to multiply, and those of a block

    // Adds the bias to sums[row * stride + i] of `count` columns from `first` on, rounds and writes them.
    void write(const float* sums, int64_t stride, int64_t first, int64_t count) const;
};

// Multiplies with AMX and returns true, or returns false where the processor or the system does not have it.
bool multiply_tiles(const PackedProduct& product);
