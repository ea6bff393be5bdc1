// The checks of the arguments of inference attention. A plan holds what they find: the sequences and masks of a call.
// attention_layout.h checks and reads the layouts; attention_infer.cpp computes.
#pragma once

#include "attention_infer.h"

namespace emulator {

// The head dimensions of latent attention: of queries that are projected to the latent, of others, and of the rotary
// part.
constexpr int64_t kLatentDim = 512, kPlainDim = 128, kRopeDim = 64, kMostLatentQueries = 16;

struct AttentionPlan {
    explicit AttentionPlan(const InferAttention& request);  // throws Refused for what the hardware would refuse
    AttentionLayout layout;
    int64_t heads, kv_heads, batch, query_rows;
    int64_t key_rows;  // rows of keys that a mask must cover
    bool paged, decode;
    std::vector<Span> queries, keys;
};

// Returns the mask of keys that the queries of a sequence must not attend to, or an undefined tensor if there are none.
at::Tensor hidden_keys(const InferAttention& request, const AttentionPlan& plan, int64_t sequence);

}  // namespace emulator
