// What the arguments of one inference attention mean: its sequences, and which keys each query sees.
#pragma once

#include "attention_infer.h"

namespace emulator {

struct AttentionPlan {
    explicit AttentionPlan(const InferAttention& request);  // throws Refused where the hardware would
    AttentionLayout layout;
    int64_t heads, kv_heads, batch, query_rows;
    int64_t key_rows;  // that a mask must cover
    bool paged, decode;
    std::vector<Span> queries, keys;
};

// Which keys the queries of a sequence must not see; undefined if they see all.
at::Tensor hidden_keys(const InferAttention& request, const AttentionPlan& plan, int64_t sequence);

}  // namespace emulator
