// Fused attention of the inference interfaces (FusedInferAttentionScore, IncreFlashAttention, PromptFlashAttention),
// which differ only in the order of their arguments.
#pragma once

#include <utility>

#include "attention_layout.h"

namespace emulator {

struct InferAttention {
    In query;
    Ins key, value;  // one tensor, or one for each sequence
    In bias, mask;
    Ints query_lengths, key_lengths;
    In block_table, sink;
    In query_rope, key_rope;  // of latent attention: the last elements of the head dimension; or empty
    In key_scale, value_scale;  // of a quantized paged cache, float32 [blocks, N, block_size]; or empty
    int64_t key_mode, value_mode;
    int64_t heads, kv_heads;  // kv_heads 0 means heads
    double scale;
    int64_t before, after;
    std::string layout;
    int64_t sparse_mode, block_size, inner_precise;
    bool want_lse;
    bool first_version;  // of FusedInferAttentionScore: V3 or an older interface
    std::vector<std::pair<const char*, bool>> unsupported;  // unsupported arguments, and whether the caller passed them
};

void check(const InferAttention& request);  // throws Refused
void run(const InferAttention& request, const Out& output, const Out& lse);
double flops(const InferAttention& request);

}  // namespace emulator
