#include "attention_core.h"

#include <limits>

namespace emulator {

namespace {

// Clamps a window size. Callers pass nearly the largest integer for "no limit", which would overflow when added to a
// position.
int64_t bounded(int64_t tokens) {
    constexpr int64_t most = int64_t{1} << 40;
    return std::min(std::max(tokens, -most), most);
}

}  // namespace

at::Tensor AttentionResult::lse() const {
    return at::where(sum == 0, std::numeric_limits<float>::infinity(), max + at::log(sum));
}

at::Tensor outside_band(int64_t queries, int64_t keys, int64_t before, int64_t after, int64_t shift) {
    before = bounded(before), after = bounded(after);
    bool all_seen = shift + after >= keys - 1 && queries - 1 + shift - before <= 0;
    if (all_seen) return {};
    auto distance =
        at::arange(keys, at::kLong).unsqueeze(0) - at::arange(shift, queries + shift, at::kLong).unsqueeze(1);
    return (distance > after).logical_or_(distance < -before);
}

at::Tensor either(const at::Tensor& first, const at::Tensor& second) {
    if (!first.defined()) return second;
    if (!second.defined()) return first;
    return at::logical_or(first, second);
}

UNDEFINED("the documents require this mask, but a kernel does not check it");
void check_causal_template(const at::Tensor& mask) {
    auto square = mask.view({kCausalTemplate, kCausalTemplate});
    auto at = [&](int64_t row, int64_t column) { return square[row][column].item<bool>(); };
    int64_t last = kCausalTemplate - 1;
    if (at(0, 0) || !at(0, 1) || at(last, 0) || !at(0, last) || at(last, last) || !at(last - 1, last))
        throw std::runtime_error(
            "atten_mask of sparse_mode 2, 3 and 4 must be True above the diagonal and False elsewhere");
}

AttentionResult attend(const AttentionInputs& inputs) {
    int64_t heads = inputs.query.size(0), queries = inputs.query.size(1), kv_heads = inputs.key.size(0);
    int64_t keys = inputs.key.size(1), value_dim = inputs.value.size(2), group = heads / kv_heads;
    auto options = at::TensorOptions().dtype(at::kFloat);
    if (keys == 0 || queries == 0)
        return {at::zeros({heads, queries, value_dim}, options), at::zeros({heads, queries}, options),
                at::zeros({heads, queries}, options)};

    // The query heads of a group share a key head, so each key head needs one batched product.
    auto query = inputs.query.to(at::kFloat).reshape({kv_heads, group * queries, -1});
    auto key = inputs.key.to(at::kFloat), value = inputs.value.to(at::kFloat);
    auto scores = at::bmm(query, key.transpose(1, 2)).view({heads, queries, keys});
    if (inputs.bias.defined() && inputs.bias_before_scale) scores.add_(inputs.bias.to(at::kFloat));
    scores.mul_(inputs.scale);
    if (inputs.bias.defined() && !inputs.bias_before_scale) scores.add_(inputs.bias.to(at::kFloat));
    if (inputs.hidden.defined()) scores.masked_fill_(inputs.hidden, -std::numeric_limits<float>::infinity());

    auto max = scores.amax(-1);
    if (inputs.sink.defined()) max = at::maximum(max, inputs.sink.to(at::kFloat).view({heads, 1}));
    max.masked_fill_(at::isneginf(max), 0);
    auto weights = scores.sub_(max.unsqueeze(-1)).exp_();
    auto sum = weights.sum(-1);
    if (inputs.sink.defined()) sum = sum + at::exp(inputs.sink.to(at::kFloat).view({heads, 1}) - max);
    auto output = at::bmm(weights.view({kv_heads, group * queries, keys}), value).view({heads, queries, value_dim});
    output.div_(sum.masked_fill(sum == 0, 1).unsqueeze(-1));
    return {output, max, sum};
}

double attention_flops(int64_t heads, int64_t queries, int64_t keys, int64_t key_dim, int64_t value_dim) {
    return 2.0 * heads * queries * keys * (key_dim + value_dim);
}

}  // namespace emulator
