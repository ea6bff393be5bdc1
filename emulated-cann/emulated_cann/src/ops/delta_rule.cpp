// The gated delta rule: token by token for a few tokens of each sequence, and in chunks for many.
#include "grouped.h"
#include "numeric.h"

namespace {

using namespace emulator;

constexpr int64_t kMostTokens = 8, kMostHeads = 256, kMostDim = 512, kMostChunkHeads = 64, kMostChunkDim = 128;

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_recurrent_gated_delta_rule.md; "
           "op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_chunk_gated_delta_rule.md");

void check_inputs(const In& query, const In& key, const In& value, const In& beta, const In& state, const In& lengths,
                  const In& g, const Out& out) {
    for (const In* each : {&query, &key, &value, &beta, &state, static_cast<const In*>(&out)})
        require(bool(*each) && each->dtype() == at::kBFloat16, "query, key, value, beta, state and out must be bfloat16");
    require(query.dim() == 3 && value.dim() == 3, "query and value must have 3 dimensions");
    int64_t tokens = query.size(0), key_heads = query.size(1), heads = value.size(1);
    require_shape(key, query.sizes().vec(), "key");
    require(value.size(0) == tokens && heads % key_heads == 0,
            "value must have query's tokens, and a multiple of its heads");
    require_shape(beta, {tokens, heads}, "beta");
    require(state.dim() == 4, "state must have 4 dimensions");
    require_shape(state, {state.size(0), heads, value.size(2), query.size(2)}, "state");
    require(bool(lengths), "actual_seq_lengths is required");
    require_dtype(lengths, {at::kInt}, "actual_seq_lengths");
    require(lengths.dim() == 1, "actual_seq_lengths must have 1 dimension");
    if (g) {
        require_dtype(g, {at::kFloat}, "g");
        require_shape(g, {tokens, heads}, "g");
    }
    require_shape(out, value.sizes().vec(), "out");
}

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_recurrent_gated_delta_rule.md");

void check_recurrent(In query, In key, In value, In beta, InOut state, In lengths, In indices, In g, In gk, In accepted,
                     float, Out out) {
    require(product_line("RecurrentGatedDeltaRule") == Line::a2_a3, "it is not for " + soc_name());
    check_inputs(query, key, value, beta, state, lengths, g, out);
    require(!gk, "gk is reserved");
    require(query.size(1) <= kMostHeads && value.size(1) <= kMostHeads, "there must be at most 256 heads");
    require(query.size(2) <= kMostDim && value.size(2) <= kMostDim, "a head must have at most 512 elements");
    require(state.size(0) >= query.size(0), "state must have a slot for each token");
    require(bool(indices), "ssm_state_indices is required");
    require_dtype(indices, {at::kInt}, "ssm_state_indices");
    require_shape(indices, {query.size(0)}, "ssm_state_indices");
    if (accepted) {
        require_dtype(accepted, {at::kInt}, "num_accepted_tokens");
        require_shape(accepted, {lengths.size(0)}, "num_accepted_tokens");
    }
}

// Advances a state, [heads, value_dim, key_dim], by a token; returns the result.
at::Tensor advance(at::Tensor& state, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const at::Tensor& beta, const at::Tensor& decay) {
    auto groups = state.size(0) / key.size(0);
    auto k = key.repeat_interleave(groups, 0).unsqueeze(-1), q = query.repeat_interleave(groups, 0).unsqueeze(-1);
    state = state * decay.exp().view({-1, 1, 1});
    auto change = beta.unsqueeze(-1) * (value - at::matmul(state, k).squeeze(-1));
    state = state + change.unsqueeze(-1) * k.transpose(1, 2);
    return at::matmul(state, q).squeeze(-1);
}

struct Tokens {
    at::Tensor query, key, value, beta, decay;
    Tokens(const In& q, const In& k, const In& v, const In& b, const In& g, double scale)
        : query(q.tensor().to(at::kFloat) * scale),
          key(k.tensor().to(at::kFloat)),
          value(v.tensor().to(at::kFloat)),
          beta(b.tensor().to(at::kFloat)),
          decay(g ? g.tensor() : at::zeros_like(beta)) {}
    at::Tensor advance(at::Tensor& state, int64_t token) const {
        return ::advance(state, query[token], key[token], value[token], beta[token], decay[token]);
    }
};

void RecurrentGatedDeltaRule(In query, In key, In value, In beta, InOut state, In lengths, In indices, In g, In,
                             In accepted, float scale, Out out) {
    Tokens tokens(query, key, value, beta, g, scale);
    auto slots = indices.tensor().to(at::kLong), states = state.raw();
    auto results = at::zeros_like(tokens.value);
    int64_t first = 0;
    for (int64_t row = 0; row < lengths.size(0); ++row) {
        int64_t count = lengths.tensor()[row].item<int64_t>();
        if (count < 1 || count > kMostTokens || first + count > query.size(0))
            throw std::runtime_error("a sequence must have 1 to 8 tokens, and all have those of query");
        int64_t taken = accepted ? accepted.tensor()[row].item<int64_t>() : 1;
        if (taken < 1 || taken > count) throw std::runtime_error("num_accepted_tokens must be 1 to a sequence's tokens");
        auto current = states[slots[first + taken - 1].item<int64_t>()].to(at::kFloat);
        for (int64_t token = first; token < first + count; ++token) {
            results[token].copy_(tokens.advance(current, token));
            states[slots[token].item<int64_t>()].copy_(current);
        }
        first += count;
    }
    out.set(results);
}

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_chunk_gated_delta_rule.md");

void check_chunk(In query, In key, In value, In beta, In state, In lengths, float, In g, Out out, Out final_state) {
    require(product_line("ChunkGatedDeltaRule") != Line::inference, "it is not for " + soc_name());
    check_inputs(query, key, value, beta, state, lengths, g, out);
    require(query.size(1) <= kMostChunkHeads && value.size(1) <= kMostChunkHeads, "there must be at most 64 heads");
    require(query.size(2) <= kMostChunkDim && value.size(2) <= kMostChunkDim, "a head must have at most 128 elements");
    require(state.size(0) == lengths.size(0), "initial_state must have a state for each sequence");
    require_shape(final_state, state.sizes().vec(), "final_state");
}

// The documents leave open what happens for decays below -1; the emulated CANN refuses them.
void ChunkGatedDeltaRule(In query, In key, In value, In beta, In state, In lengths, float scale, In g, Out out,
                         Out final_state) {
    Tokens tokens(query, key, value, beta, g, scale);
    if ((tokens.decay < -1).any().item<bool>() || (tokens.decay > 0).any().item<bool>())
        throw std::runtime_error("g must be -1 to 0");
    auto results = at::zeros_like(tokens.value), states = state.tensor().to(at::kFloat).clone();
    int64_t first = 0;
    for (int64_t row = 0; row < lengths.size(0); ++row) {
        int64_t end = first + lengths.tensor()[row].item<int64_t>();
        if (end < first || end > query.size(0)) throw std::runtime_error("the sequences must have the tokens of query");
        auto current = states[row];
        for (; first < end; ++first) results[first].copy_(tokens.advance(current, first));
        states[row] = current;
    }
    out.set(results);
    final_state.set(states);
}

}  // namespace

ACLNN(RecurrentGatedDeltaRule, .check = check_recurrent)
ACLNN(ChunkGatedDeltaRule, .check = check_chunk)
