// The attention that all emulated kernels share. It computes in float32; the caller rounds once when it stores the
// result.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

namespace emulator {

// The inputs of one sequence. Hidden, bias and sink may be undefined.
struct AttentionInputs {
    at::Tensor query;  // [heads, queries, D]
    at::Tensor key;    // [kv_heads, keys, D]; heads is a multiple of kv_heads
    at::Tensor value;  // [kv_heads, keys, Dv]
    double scale;
    at::Tensor hidden;  // bool, broadcasts to [heads, queries, keys]: true where a query must not attend to a key
    at::Tensor bias;    // likewise, added to the scaled scores
    at::Tensor sink;    // [heads]: a score that enters the softmax's denominator and has no value
    bool bias_before_scale = false;
};

// A query that attends to no key has output 0, sum 0 and an infinite log-sum-exp, as on hardware.
struct AttentionResult {
    at::Tensor output;    // [heads, queries, Dv], float32
    at::Tensor max, sum;  // [heads, queries], float32: of the scores, and of exp(score - max)
    at::Tensor lse() const;
};

AttentionResult attend(const AttentionInputs& inputs);

// Returns a mask that is true where key j lies outside [i + shift - before, i + shift + after] for query i, or an
// undefined tensor if no key does.
at::Tensor outside_band(int64_t queries, int64_t keys, int64_t before, int64_t after, int64_t shift);

// Returns the union of two such masks. Either may be undefined.
at::Tensor either(const at::Tensor& first, const at::Tensor& second);

// The number of rows and columns of the mask of sparse modes 2, 3 and 4, independent of the lengths.
constexpr int64_t kCausalTemplate = 2048;
// Throws unless such a mask is True above the diagonal only. Hardware does not check it, and masks the wrong keys for
// other contents.
void check_causal_template(const at::Tensor& mask);

// Returns the floating-point operations of both matrix products of one sequence.
double attention_flops(int64_t heads, int64_t queries, int64_t keys, int64_t key_dim, int64_t value_dim);

}  // namespace emulator
