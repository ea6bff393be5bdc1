// Products of each head's rows with a matrix of the head, such as the projections of latent attention.
#pragma once

#include <cstdint>

struct HeadProduct {
    int64_t tokens, heads, in, out;
    int64_t x_stride, x_head_stride;  // in elements; a head stride of 0 gives all heads the same rows
    int64_t weight_head_stride;
    bool transposed;  // whether a row of a head's weight has the factors of one result, or else of one input
    int64_t y_stride, y_head_stride;
};

// Rows of the weights follow one another. All threads share the work.
template <class T>
void head_linear(const HeadProduct& product, const T* x, const T* weight, T* y);
