// Attention as every kernel here computes it: float32 inside, rounded once when the caller stores the result.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

namespace emulator {

// One sequence. Hidden, bias and sink may be undefined.
struct AttentionInputs {
    at::Tensor query;  // [heads, queries, D]
    at::Tensor key;    // [kv_heads, keys, D]; heads is a multiple of kv_heads
    at::Tensor value;  // [kv_heads, keys, Dv]
    double scale;
    at::Tensor hidden;  // bool, broadcasts to [heads, queries, keys]: true where a query must not see a key
    at::Tensor bias;    // likewise, added to the scaled scores
    at::Tensor sink;    // [heads]: a score that takes its share of the softmax and brings no value
    bool bias_before_scale = false;
};

// A query that sees no key has output 0, sum 0 and an infinite log-sum-exp, as the hardware writes them.
struct AttentionResult {
    at::Tensor output;    // [heads, queries, Dv], float32
    at::Tensor max, sum;  // [heads, queries], float32: of the scores, and of exp(score - max)
    at::Tensor lse() const;
};

AttentionResult attend(const AttentionInputs& inputs);

// True where key j lies outside [i + shift - before, i + shift + after] for query i. Undefined if nothing does.
at::Tensor outside_band(int64_t queries, int64_t keys, int64_t before, int64_t after, int64_t shift);

// Two such masks as one; either may be undefined.
at::Tensor either(const at::Tensor& first, const at::Tensor& second);

// Rows and columns of the mask that sparse modes 2, 3 and 4 take, whatever the lengths.
constexpr int64_t kCausalTemplate = 2048;
// Throws unless such a mask is True above the diagonal only. Other contents hide the wrong keys without a word on
// hardware.
void check_causal_template(const at::Tensor& mask);

// Of one sequence: both matrix products.
double attention_flops(int64_t heads, int64_t queries, int64_t keys, int64_t key_dim, int64_t value_dim);

}  // namespace emulator
