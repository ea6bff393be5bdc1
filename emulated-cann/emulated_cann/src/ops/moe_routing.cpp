// The order of tokens by their experts, in the older forms, and where each expert's tokens end.
#include "moe.h"

namespace {

using namespace emulator;

DOCUMENTED(
    "ops-transformer: moe/moe_init_routing/docs/aclnnMoeInitRouting.md"
    "; ops-transformer: moe/moe_init_routing_v2/docs/aclnnMoeInitRoutingV2.md"
    "; ops-transformer: moe/moe_init_routing_quant_v2/docs/aclnnMoeInitRoutingQuantV2.md");
void check_tokens(const In& x, const In& expert_idx, const Out& index, int64_t active_num) {
    require(is_floating(x), "x must be float16, bfloat16 or float32, not " + text(x.dtype()));
    require(x.dim() == 2, "x must be [tokens, H], but has shape " + shown(x.sizes()));
    require(x.size(0) == expert_idx.size(0),
            "x has " + text(x.size(0)) + " tokens, but expert_idx " + text(expert_idx.size(0)));
    require(active_num >= 0, "active_num must be at least 0, but is " + text(active_num));
    require(index.dtype() == at::kInt && has_shape(index, {c10::multiply_integers(expert_idx.sizes())}),
            "expanded_row_idx must be int32 with an element for each choice");
}

DOCUMENTED("ops-transformer: moe/moe_init_routing/docs/aclnnMoeInitRouting.md");
void check_routing(In x, In row_idx, In expert_idx, int64_t active_num, Out expanded, Out index, Out expert_out) {
    require(on({Chip::a2_a3, Chip::ascend950}),
            "MoeInitRouting is for Atlas A2, A3 and Ascend 950, not for " + soc_name());
    require(expert_idx.dtype() == at::kInt && expert_idx.dim() == 2,
            "expert_idx must be int32 [tokens, K], not " + text(expert_idx.dtype()) + " " + shown(expert_idx.sizes()));
    check_tokens(x, expert_idx, index, active_num);
    require(row_idx.dtype() == at::kInt && has_shape(row_idx, expert_idx.sizes()),
            "row_idx must be int32 and have expert_idx's shape, " + shown(expert_idx.sizes()));
    require(expanded.dtype() == x.dtype() &&
                has_shape(expanded, {std::min(x.size(0), active_num) * expert_idx.size(1), x.size(1)}),
            "expanded_x must be [min(tokens, active_num) * K, H] of x's dtype");
    require(expert_out.dtype() == at::kInt && has_shape(expert_out, index.sizes()),
            "expanded_expert_idx must be int32 with an element for each choice");
}

void MoeInitRouting(In x, In row_idx, In expert_idx, int64_t, Out expanded, Out index, Out expert_out) {
    auto [experts, order] = at::sort(expert_idx.tensor().reshape(-1), /*stable=*/true, 0, false);
    auto rows = row_idx.tensor().reshape(-1).to(at::kLong).index_select(0, order);
    int64_t choices = rows.size(0);
    if (choices == 0) return;
    UNDEFINED("a kernel would write other memory");
    if (rows.min().item<int64_t>() < 0 || rows.max().item<int64_t>() >= choices)
        throw std::runtime_error("row_idx must be between 0 and " + text(choices - 1));
    auto inverse = at::zeros({choices}, at::kLong);
    inverse.index_put_({rows}, at::arange(choices, at::kLong));
    index.set(inverse);
    expert_out.set(experts);
    expanded.set(x.tensor().index_select(0, at::remainder(rows.narrow(0, 0, expanded.size(0)), x.size(0))));
}

DOCUMENTED(
    "ops-transformer: moe/moe_init_routing_v2/docs/aclnnMoeInitRoutingV2.md"
    "; ops-transformer: moe/moe_init_routing_quant_v2/docs/aclnnMoeInitRoutingQuantV2.md"
    "; ops-transformer: moe/moe_init_routing_v2/op_host/moe_init_routing_v2_tiling.cpp");
// What V2 and QuantV2 have in common: the same outputs, one of which QuantV2 quantizes.
void check_second(const In& x, const In& expert_idx, int64_t active_num, int64_t capacity, int64_t experts,
                  int64_t drop_pad, int64_t counting, bool before, const Out& expanded, const Out& index,
                  const Out& counts, const Out& counts_before) {
    check_tokens(x, expert_idx, index, active_num);
    require(capacity >= 0 && experts >= 0, "expert_capacity and expert_num must be at least 0, but are " +
                                               text(capacity) + " and " + text(experts));
    require(drop_pad == 0 || drop_pad == 1, "drop_pad_mode must be 0 or 1, but is " + text(drop_pad));
    require(counting >= 0 && counting <= 2,
            "expert_tokens_count_or_cumsum_flag must be 0, 1 (cumulative) or 2 (count), but is " + text(counting));
    require(experts > 0 || (!drop_pad && !counting), "expert_num must be greater than 0 to pad or to count");
    if (drop_pad)
        require(capacity > 0 && capacity <= x.size(0), "with drop_pad_mode 1 expert_capacity must be between 1 and " +
                                                           text(x.size(0)) + ", but is " + text(capacity));
    int64_t choices = index.size(0);
    auto shape = drop_pad ? std::vector<int64_t>{experts, capacity, x.size(1)}
                          : std::vector<int64_t>{active_num ? std::min(active_num, choices) : choices, x.size(1)};
    require(has_shape(expanded, shape),
            "expanded_x must have shape " + shown(shape) + ", but has " + shown(expanded.sizes()));
    if (!drop_pad && counting)
        require(counts && counts.dtype() == at::kInt && has_shape(counts, {experts}),
                "expert_tokens_count_or_cumsum must be int32 [expert_num], [" + text(experts) + "]");
    if (drop_pad && before)
        require(counts_before && counts_before.dtype() == at::kInt && has_shape(counts_before, {experts}),
                "expert_tokens_before_capacity must be int32 [expert_num], [" + text(experts) + "]");
}

void check_routing_v2(In x, In expert_idx, int64_t active_num, int64_t capacity, int64_t experts, int64_t drop_pad,
                      int64_t counting, bool before, Out expanded, Out index, Out counts, Out counts_before) {
    require(on({Chip::a2_a3, Chip::ascend310p, Chip::ascend950}),
            "MoeInitRoutingV2 is for Atlas A2, A3, Ascend 310P and 950, not for " + soc_name());
    bool is_950 = on({Chip::ascend950});
    require(expert_idx.dtype() == at::kInt || (is_950 && expert_idx.dtype() == at::kLong),
            "expert_idx must be int32, on Ascend 950 int32 or int64, not " + text(expert_idx.dtype()));
    require(expert_idx.dim() == 2 || (is_950 && expert_idx.dim() == 1),
            "expert_idx must be [tokens, K], on Ascend 950 also [tokens], but has shape " + shown(expert_idx.sizes()));
    check_second(x, expert_idx, active_num, capacity, experts, drop_pad, counting, before, expanded, index, counts,
                 counts_before);
    require(expanded.dtype() == x.dtype(), "expanded_x must be of x's dtype, " + text(x.dtype()));
    if (!on({Chip::ascend310p})) return;
    require(drop_pad == 0, "on Ascend 310P drop_pad_mode must be 0");
    require(x.size(1) % 32 == 0, "on Ascend 310P H must be a multiple of 32, but is " + text(x.size(1)));
    DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_init_routing_v2.md");
    require(x.dtype() != at::kBFloat16, "on Ascend 310P x must be float16 or float32");
}

struct Routed {
    at::Tensor tokens, experts, slots;  // int64 [rows]: of each row that is kept: its token, its expert, its place
};

// Writes all but expanded_x.
Routed route(const In& expert_idx, int64_t active_num, int64_t capacity, int64_t experts, int64_t drop_pad,
             int64_t counting, bool before, const Out& index, const Out& counts_out, const Out& counts_before) {
    auto chosen = expert_idx.tensor();
    int64_t k = chosen.dim() == 2 ? chosen.size(1) : 1;
    bool bounded = drop_pad || counting;
    if (chosen.numel()) {
        int64_t least = chosen.min().item<int64_t>(), most = chosen.max().item<int64_t>();
        if (least < 0 || (bounded && most >= experts))
            throw std::runtime_error("expert_idx has " + text(least) + " to " + text(most) + ", but there are " +
                                     text(experts) + " experts");
    }
    auto sorted = sort_choices(chosen, 0, bounded ? experts : std::numeric_limits<int64_t>::max());
    at::Tensor counts = bounded ? count_choices(sorted, experts) : at::Tensor();
    if (!drop_pad && counting) counts_out.set(counting == 1 ? counts.cumsum(0) : counts);
    if (drop_pad && before) counts_before.set(counts);
    auto slots = drop_pad ? place_in_slots(sorted, counts, capacity) : at::arange(sorted.active, at::kLong);
    index.set(gather_index(sorted, slots));
    auto kept = slots.ge(0);
    if (!drop_pad && active_num) kept = kept.logical_and_(slots.lt(active_num));
    auto which = kept.nonzero().squeeze(1);
    return {at::div(sorted.places.index_select(0, which), k, "floor"), sorted.experts.index_select(0, which),
            slots.index_select(0, which)};
}

// Rows in their slots; what no row fills is zero.
at::Tensor placed(const at::Tensor& rows, const at::Tensor& slots, at::IntArrayRef shape) {
    return at::zeros({c10::multiply_integers(shape.slice(0, shape.size() - 1)), shape.back()}, rows.options())
        .index_put_({slots}, rows)
        .view(shape);
}

void MoeInitRoutingV2(In x, In expert_idx, int64_t active_num, int64_t capacity, int64_t experts, int64_t drop_pad,
                      int64_t counting, bool before, Out expanded, Out index, Out counts, Out counts_before) {
    auto routed = route(expert_idx, active_num, capacity, experts, drop_pad, counting, before, index, counts,
                        counts_before);
    expanded.set(placed(x.tensor().index_select(0, routed.tokens), routed.slots, expanded.sizes()));
}

DOCUMENTED(
    "ops-transformer: moe/moe_init_routing_quant_v2/docs/aclnnMoeInitRoutingQuantV2.md"
    "; ops-transformer: moe/moe_init_routing_quant_v2/op_host/moe_init_routing_quant_v2_tiling.cpp");
void check_routing_quant(In x, In expert_idx, In scale, In offset, int64_t active_num, int64_t capacity,
                         int64_t experts, int64_t drop_pad, int64_t counting, bool before, int64_t quant_mode,
                         Out expanded, Out index, Out counts, Out counts_before, Out scales) {
    require(on({Chip::a2_a3, Chip::ascend950}),
            "MoeInitRoutingQuantV2 is for Atlas A2, A3 and Ascend 950, not for " + soc_name());
    require(expert_idx.dtype() == at::kInt && expert_idx.dim() == 2,
            "expert_idx must be int32 [tokens, K], not " + text(expert_idx.dtype()) + " " + shown(expert_idx.sizes()));
    check_second(x, expert_idx, active_num, capacity, experts, drop_pad, counting, before, expanded, index, counts,
                 counts_before);
    require(quant_mode == 0 || quant_mode == 1, "quant_mode must be 0 or 1, but is " + text(quant_mode));
    require(expanded.dtype() == at::kChar, "expanded_x must be int8, not " + text(expanded.dtype()));
    if (scale) require(scale.dtype() == at::kFloat, "scale must be float32, not " + text(scale.dtype()));
    if (quant_mode == 0) {
        require(scale && has_shape(scale, {1}), "with quant_mode 0 scale must be given, with shape [1]");
        require(offset && offset.dtype() == at::kFloat && has_shape(offset, {1}),
                "with quant_mode 0 offset must be given, float32 with shape [1]");
        return;
    }
    require(!scale || has_shape(scale, {1, x.size(1)}) || has_shape(scale, {experts, x.size(1)}),
            "with quant_mode 1 scale must be [1, H] or [expert_num, H], but has shape " + shown(scale.sizes()));
    require(scales && scales.dtype() == at::kFloat &&
                has_shape(scales, {c10::multiply_integers(expanded.sizes().slice(0, expanded.dim() - 1))}),
            "dynamic_quant_scale must be float32 with an element for each row of expanded_x");
}

void MoeInitRoutingQuantV2(In x, In expert_idx, In scale, In offset, int64_t active_num, int64_t capacity,
                           int64_t experts, int64_t drop_pad, int64_t counting, bool before, int64_t quant_mode,
                           Out expanded, Out index, Out counts, Out counts_before, Out scales) {
    auto routed = route(expert_idx, active_num, capacity, experts, drop_pad, counting, before, index, counts,
                        counts_before);
    auto rows = x.tensor().index_select(0, routed.tokens).to(at::kFloat);
    if (quant_mode == 0)
        return expanded.set(placed(quantize_by(rows, scale.tensor(), offset.tensor()), routed.slots, expanded.sizes()));
    UNDEFINED("a kernel would read other memory");
    if (scale && scale.size(0) > 1) {
        if (routed.experts.numel() && routed.experts.max().item<int64_t>() >= experts)
            throw std::runtime_error("expert_idx names an expert that scale has no row for");
        rows = rows * scale.tensor().index_select(0, routed.experts);
    } else if (scale) {
        rows = rows * scale.tensor();
    }
    auto quantized = quantize_each(rows);
    expanded.set(placed(quantized.values, routed.slots, expanded.sizes()));
    scales.set(at::zeros(scales.sizes()).index_put_({routed.slots}, quantized.scales));
}

DOCUMENTED("ops-transformer: moe/moe_compute_expert_tokens/docs/aclnnMoeComputeExpertTokens.md");
void check_ends(In sorted, int64_t experts, Out ends) {
    require(on({Chip::a2_a3, Chip::ascend950}),
            "MoeComputeExpertTokens is for Atlas A2, A3 and Ascend 950, not for " + soc_name());
    require(sorted.dtype() == at::kInt && sorted.dim() == 1 && sorted.size(0) < (1 << 24),
            "sorted_experts must be int32 of 1 dimension with fewer than 2**24 elements, not " +
                text(sorted.dtype()) + " " + shown(sorted.sizes()));
    require(experts > 0 && experts <= 2048, "num_experts must be between 1 and 2048, but is " + text(experts));
    require(ends.dtype() == at::kInt && has_shape(ends, {experts}), "the output must be int32 [num_experts]");
}

void MoeComputeExpertTokens(In sorted, int64_t experts, Out ends) {
    auto values = sorted.tensor().to(at::kLong);
    DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_compute_expert_tokens.md");
    // op-plugin's test also has the number num_experts, which no expert counts.
    if (values.numel() && (values.min().item<int64_t>() < 0 || values.max().item<int64_t>() > experts ||
                           values.diff().lt(0).any().item<bool>()))
        throw std::runtime_error("sorted_experts must ascend and be between 0 and " + text(experts));
    ends.set(at::searchsorted(values, at::arange(experts, at::kLong), false, true));
}

}  // namespace

ACLNN(MoeInitRouting, .check = check_routing)
ACLNN(MoeInitRoutingV2, .check = check_routing_v2)
ACLNN(MoeInitRoutingQuantV2, .check = check_routing_quant)
ACLNN(MoeComputeExpertTokens, .check = check_ends)
