// The weighted sum of what the experts of a token returned.
#include "moe.h"

namespace {

using namespace emulator;

bool is_padded(int64_t mode) { return mode == 1 || mode == 3; }
bool is_by_token(int64_t mode) { return mode >= 2; }  // expanded_row_idx is [tokens, K], else [K, tokens]

DOCUMENTED(
    "ops-transformer: moe/moe_finalize_routing_v2/docs/aclnnMoeFinalizeRoutingV4.md"
    "; ops-transformer: moe/moe_finalize_routing_v2/docs/aclnnMoeFinalizeRoutingV2.md"
    "; ops-transformer: moe/moe_finalize_routing_v2/op_host/moe_finalize_routing_v2_tiling_membase.cpp");
void check_310p(const In& expanded, const In& x1, const In& x2, const In& bias, const In& scales, const In& experts,
                int64_t mode) {
    require(!x1 && !x2 && !bias && !experts, "on Ascend 310P there must be no x1, x2, bias or expert_idx");
    require(mode == 2, "on Ascend 310P drop_pad_mode must be 2, but is " + text(mode));
    require(is_any(expanded, {at::kHalf, at::kFloat}),
            "on Ascend 310P expanded_x must be float16 or float32, not " + text(expanded.dtype()));
    require(expanded.size(-1) % 32 == 0,
            "on Ascend 310P H must be a multiple of 32, but is " + text(expanded.size(-1)));
    if (scales)
        require(scales.dtype() == expanded.dtype(), "on Ascend 310P scales must be of expanded_x's dtype, " +
                                                        text(expanded.dtype()) + ", not " + text(scales.dtype()));
}

void check_scales(const In& expanded, const In& scales, int64_t k) {
    if (!scales) return;
    require(scales.dim() == 2, "scales must be [tokens, K], but has shape " + shown(scales.sizes()));
    require(k <= 1 || k == scales.size(1),
            "k must be that of scales, " + text(scales.size(1)) + ", or 1, but is " + text(k));
    require(is_floating(scales), "scales must be float16, bfloat16 or float32, not " + text(scales.dtype()));
    bool wide = expanded.dtype() == at::kBFloat16 && scales.dtype() == at::kFloat;
    require(scales.dtype() == expanded.dtype() || wide || on({Chip::ascend950}),
            "scales must be of expanded_x's dtype, " + text(expanded.dtype()) +
                ", or float32 where that is bfloat16, not " + text(scales.dtype()));
}

void check_addend(const In& addend, const In& expanded, const Out& out, const std::string& name) {
    if (!addend) return;
    require(addend.dtype() == expanded.dtype(),
            name + " must be of expanded_x's dtype, " + text(expanded.dtype()) + ", not " + text(addend.dtype()));
    require(has_shape(addend, out.sizes()),
            name + " must have the output's shape, " + shown(out.sizes()) + ", but has " + shown(addend.sizes()));
}

void check_bias(const In& expanded, const In& bias, const In& experts, int64_t k, int64_t mode) {
    if (!bias) return;
    require(bool(experts), "bias needs expert_idx");
    require(bias.dtype() == expanded.dtype(), "bias must be of expanded_x's dtype, " + text(expanded.dtype()));
    require(bias.dim() == 2 && bias.size(1) == expanded.size(-1),
            "bias must be [experts, H], but has shape " + shown(bias.sizes()));
    require(bias.size(0) >= k, "there must be at least K = " + text(k) + " experts, but bias has " +
                                   text(bias.size(0)));
    require(!is_padded(mode) || bias.size(0) == expanded.size(0),
            "bias and expanded_x must have as many experts where that is padded");
}

void check_finalize(const In& expanded, const In& index, const In& x1, const In& x2, const In& bias, const In& scales,
                    const In& experts, int64_t mode, int64_t k, const Out& out) {
    require(on({Chip::a2_a3, Chip::ascend310p, Chip::ascend950}),
            "MoeFinalizeRouting is for Atlas A2, A3, Ascend 310P and 950, not for " + soc_name());
    require(mode >= 0 && mode <= 3, "drop_pad_mode must be between 0 and 3, but is " + text(mode));
    require(is_floating(expanded),
            "expanded_x must be float16, bfloat16 or float32, not " + text(expanded.dtype()));
    require(expanded.dim() == (is_padded(mode) ? 3 : 2),
            "expanded_x must be [tokens * K, H], or [experts, capacity, H] with drop_pad_mode 1 and 3, but has shape " +
                shown(expanded.sizes()));
    if (on({Chip::ascend310p})) check_310p(expanded, x1, x2, bias, scales, experts, mode);
    require(index.dtype() == at::kInt && index.dim() == 1, "expanded_row_idx must be int32 of 1 dimension, not " +
                                                               text(index.dtype()) + " " + shown(index.sizes()));
    check_scales(expanded, scales, k);
    if (scales) k = scales.size(1);
    require(k > 0, "k must be at least 1, but is " + text(k));
    int64_t tokens = scales ? scales.size(0) : index.size(0) / k;
    require(index.size(0) == tokens * k, "expanded_row_idx must have " + text(tokens) + " * " + text(k) +
                                             " elements, but has " + text(index.size(0)));
    require(is_padded(mode) || on({Chip::ascend950}) || expanded.size(0) == index.size(0),
            "expanded_x must have as many rows as expanded_row_idx has elements, " + text(index.size(0)) +
                ", but has " + text(expanded.size(0)));
    require(out.dtype() == expanded.dtype() && has_shape(out, {tokens, expanded.size(-1)}),
            "the output must be [tokens, H] of expanded_x's dtype");
    require(x1 || !x2, "x2 needs x1");
    check_addend(x1, expanded, out, "x1");
    check_addend(x2, expanded, out, "x2");
    if (experts)
        require(experts.dtype() == at::kInt && has_shape(experts, {tokens, k}),
                "expert_idx must be int32 [tokens, K], not " + text(experts.dtype()) + " " + shown(experts.sizes()));
    check_bias(expanded, bias, experts, k, mode);
}

void check_v2(In expanded, In index, In x1, In x2, In bias, In scales, In experts, int64_t mode, Out out) {
    check_finalize(expanded, index, x1, x2, bias, scales, experts, mode, 1, out);
}

void check_v4(In expanded, In index, In x1, In x2, In bias, In scales, In experts, In x, In alpha1, In alpha2, In v,
              int64_t mode, Ints zero, Ints copied, Ints constant, int64_t k, Out out) {
    if (x || alpha1 || alpha2 || v || zero || copied || constant)
        throw NotEmulated("zero, copy and constant experts are not emulated");
    check_finalize(expanded, index, x1, x2, bias, scales, experts, mode, k, out);
}

// A token whose place is -1 was dropped: its expert returned zeros.
void finalize(const In& expanded, const In& index, const In& x1, const In& x2, const In& bias, const In& scales,
              const In& experts, int64_t mode, int64_t k, const Out& out) {
    auto rows = expanded.tensor().flatten(0, -2);
    if (scales) k = scales.size(1);
    int64_t tokens = out.size(0);
    auto places = index.tensor().to(at::kLong);
    if (places.numel() == 0) return;
    UNDEFINED("the documents allow no such index, and a kernel would read other memory");
    int64_t least = places.min().item<int64_t>(), most = places.max().item<int64_t>();
    if (least < (is_padded(mode) ? -1 : 0) || most >= rows.size(0))
        throw std::runtime_error("expanded_row_idx has " + text(least) + " to " + text(most) + ", but expanded_x has " +
                                 text(rows.size(0)) + " rows");
    auto by_choice = is_by_token(mode) ? places.view({tokens, k}).t() : places.view({k, tokens});
    auto sum = at::zeros(out.sizes(), at::kFloat);
    if (x1) sum += x1.tensor();
    if (x2) sum += x2.tensor();
    for (int64_t choice = 0; choice < k; ++choice) {
        auto place = by_choice[choice];
        auto values = rows.index_select(0, place.clamp_min(0)).to(at::kFloat);
        values.masked_fill_(place.lt(0).unsqueeze(1), 0);
        if (bias) values += bias.tensor().index_select(0, experts.tensor().select(1, choice).to(at::kLong));
        if (scales) values *= scales.tensor().select(1, choice).to(at::kFloat).unsqueeze(1);
        sum += values;
    }
    out.set(sum);
}

void MoeFinalizeRoutingV2(In expanded, In index, In x1, In x2, In bias, In scales, In experts, int64_t mode, Out out) {
    finalize(expanded, index, x1, x2, bias, scales, experts, mode, 1, out);
}

void MoeFinalizeRoutingV4(In expanded, In index, In x1, In x2, In bias, In scales, In experts, In, In, In, In,
                          int64_t mode, Ints, Ints, Ints, int64_t k, Out out) {
    finalize(expanded, index, x1, x2, bias, scales, experts, mode, k, out);
}

}  // namespace

ACLNN(MoeFinalizeRoutingV2, .check = check_v2)
ACLNN(MoeFinalizeRoutingV4, .check = check_v4)
