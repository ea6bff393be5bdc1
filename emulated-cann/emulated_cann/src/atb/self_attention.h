// ATB's attention of prompts, as its two interfaces call it.
#pragma once

#include <string>
#include <vector>

#include "operation.h"

namespace atb {

// The masks of SelfAttentionParam, and that of a causal mask without a tensor.
enum SelfMask : int { kNoMask = 0, kPlain = 1, kAlibi = 2, kCompressed = 3, kCausal = 9 };

struct SelfAttentionCall {
    emulator::In query, key, value, table, mask;
    emulator::Out output;
    std::vector<int64_t> queries, keys;  // the lengths of each sequence
    int64_t heads, kv_heads;
    double scale;
    int mask_type;
    bool paged;    // keys and values are in blocks, which `table` names
    bool precise;  // products are in float32; the plain mask then holds 1 instead of a number to add
};

emulator::Launch self_attention(const SelfAttentionCall& call);  // throws Refused

}  // namespace atb
