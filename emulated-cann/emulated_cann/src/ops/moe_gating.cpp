// The choice of experts for each token.
#include "moe.h"

namespace {

using namespace emulator;

// The first of equal values comes first.
std::pair<at::Tensor, at::Tensor> largest(const at::Tensor& values, int64_t k) {
    auto [sorted, order] = at::sort(values, /*stable=*/true, /*dim=*/-1, /*descending=*/true);
    return {sorted.narrow(-1, 0, k), order.narrow(-1, 0, k)};
}

DOCUMENTED(
    "ops-transformer: moe/moe_gating_top_k_softmax/docs/aclnnMoeGatingTopKSoftmax.md"
    "; ops-transformer: moe/moe_gating_top_k_softmax_v2/docs/aclnnMoeGatingTopKSoftmaxV2.md"
    "; ops-transformer: moe/moe_gating_top_k_softmax/op_host/moe_gating_top_k_softmax_tiling_base.cpp");
void check_choice(const In& x, const In& finished, int64_t k, const Out& y, const Out& expert_idx) {
    require(is_floating(x), "x must be float16, bfloat16 or float32, not " + text(x.dtype()));
    require(x.dim() == 2 || x.dim() == 3, "x must have 2 or 3 dimensions, but has " + text(x.dim()));
    auto shape = x.sizes().vec();
    for (auto size : shape) require(size > 0, "x must not be empty, but has shape " + shown(shape));
    require(k > 0 && k <= shape.back(),
            "k must be between 1 and the number of experts, " + text(shape.back()) + ", but is " + text(k));
    require(k <= 1024, "k must be at most 1024, but is " + text(k));
    shape.pop_back();
    if (finished) {
        require(finished.dtype() == at::kBool, "finished must be bool, not " + text(finished.dtype()));
        require(has_shape(finished, shape), "finished must have x's shape without the experts, " + shown(shape) +
                                                ", but has " + shown(finished.sizes()));
    }
    shape.push_back(k);
    require(y.dtype() == x.dtype(), "y must be of x's dtype, " + text(x.dtype()) + ", not " + text(y.dtype()));
    require(expert_idx.dtype() == at::kInt, "expert_idx must be int32, not " + text(expert_idx.dtype()));
    require(has_shape(y, shape) && has_shape(expert_idx, shape), "y and expert_idx must have shape " + shown(shape));
}

DOCUMENTED("ops-transformer: moe/moe_gating_top_k_softmax/docs/aclnnMoeGatingTopKSoftmax.md");
void check_softmax(In x, In finished, int64_t k, Out y, Out expert_idx, Out row_idx) {
    require(on({Chip::a2_a3, Chip::ascend310p, Chip::ascend950}),
            "MoeGatingTopKSoftmax is for Atlas A2, A3, Ascend 310P and 950, not for " + soc_name());
    check_choice(x, finished, k, y, expert_idx);
    require(row_idx.dtype() == at::kInt && has_shape(row_idx, y.sizes()),
            "row_idx must be int32 and have shape " + shown(y.sizes()));
    if (on({Chip::ascend950}))
        require(x.size(-1) <= 2048, "on Ascend 950 there may be at most 2048 experts, not " + text(x.size(-1)));
    if (!on({Chip::ascend310p})) return;
    require(x.dtype() == at::kHalf && x.dim() == 2,
            "on Ascend 310P x must be float16 [tokens, experts], not " + text(x.dtype()) + " " + shown(x.sizes()));
    require(x.size(-1) % 16 == 0 && x.size(-1) <= 256,
            "on Ascend 310P the number of experts must be a multiple of 16 and at most 256, but is " +
                text(x.size(-1)));
    require(!finished, "on Ascend 310P there must be no finished");
}

// The index of the number of experts, which no expert has, for the tokens that are finished.
at::Tensor unless_finished(const at::Tensor& experts, const In& x, const In& finished) {
    return finished ? at::where(finished.tensor().unsqueeze(-1), x.size(-1), experts) : experts;
}

void MoeGatingTopKSoftmax(In x, In finished, int64_t k, Out y, Out expert_idx, Out row_idx) {
    auto [scores, experts] = largest(at::softmax(x.tensor().to(at::kFloat), -1), k);
    y.set(scores);
    expert_idx.set(unless_finished(experts, x, finished));
    int64_t tokens = x.raw().numel() / x.size(-1);
    auto rows = at::arange(tokens * k, at::kInt).view({k, tokens}).t().reshape(row_idx.sizes());
    row_idx.set(on({Chip::ascend310p}) ? at::zeros_like(rows) : rows);
}

DOCUMENTED("ops-transformer: moe/moe_gating_top_k_softmax_v2/docs/aclnnMoeGatingTopKSoftmaxV2.md");
void check_softmax_v2(In x, In finished, int64_t k, int64_t renorm, bool with_scores, Out y, Out expert_idx,
                      Out scores) {
    require(on({Chip::a2_a3, Chip::ascend950}),
            "MoeGatingTopKSoftmaxV2 is for Atlas A2, A3 and Ascend 950, not for " + soc_name());
    check_choice(x, finished, k, y, expert_idx);
    require(renorm == 0 || renorm == 1, "renorm must be 0 or 1, but is " + text(renorm));
    if (renorm == 0 && with_scores)
        require(scores && scores.dtype() == at::kFloat && has_shape(scores, x.sizes()),
                "softmax_result must be float32 and have x's shape, " + shown(x.sizes()));
}

void MoeGatingTopKSoftmaxV2(In x, In finished, int64_t k, int64_t renorm, bool with_scores, Out y, Out expert_idx,
                            Out scores) {
    auto values = x.tensor().to(at::kFloat);
    auto normalized = renorm ? values : at::softmax(values, -1);
    auto [chosen, experts] = largest(normalized, k);
    y.set(renorm ? at::softmax(chosen, -1) : chosen);
    expert_idx.set(unless_finished(experts, x, finished));
    if (!renorm && with_scores) scores.set(normalized);
}

DOCUMENTED(
    "ops-transformer: moe/moe_gating_top_k/docs/aclnnMoeGatingTopK.md"
    "; ops-transformer: moe/moe_gating_top_k/op_host/moe_gating_top_k_tiling.cpp");
void check_groups(int64_t experts, int64_t k, int64_t chosen_groups, int64_t groups, int64_t group_mode) {
    require(experts > 0 && experts <= 2048, "there may be at most 2048 experts, not " + text(experts));
    require(group_mode == 0 || group_mode == 1, "group_select_mode must be 0 or 1, but is " + text(group_mode));
    require(groups > 0 && experts % groups == 0,
            "the number of experts, " + text(experts) + ", must be a multiple of group_count, " + text(groups));
    int64_t each = experts / groups;
    require(each > group_mode, "with group_select_mode 1 a group must have at least 2 experts, but has " + text(each));
    require(chosen_groups > 0 && chosen_groups <= groups,
            "k_group must be between 1 and group_count, " + text(groups) + ", but is " + text(chosen_groups));
    require(k > 0 && k <= chosen_groups * each, "k must be between 1 and the number of experts in k_group groups, " +
                                                    text(chosen_groups * each) + ", but is " + text(k));
    int64_t padded = groups * ((each + 31) / 32 * 32);
    if (groups != 1 && groups != experts && chosen_groups != groups)
        require(padded <= 2048, "the experts of a group, padded to a multiple of 32, times group_count may be at most "
                                "2048, but are " +
                                    text(padded));
}

void check_gate(const In& x, const In& bias, int64_t k, int64_t renorm, int64_t norm, bool softplus, const Out& y,
                const Out& expert_idx, const Out& scores) {
    require(on({Chip::a2_a3, Chip::ascend950}),
            "MoeGatingTopK is for Atlas A2, A3 and Ascend 950, not for " + soc_name());
    require(is_floating(x), "x must be float16, bfloat16 or float32, not " + text(x.dtype()));
    require(x.dim() == 2 && x.size(0) > 0, "x must be [tokens, experts] and not empty, but has " + shown(x.sizes()));
    if (bias) {
        require(bias.dtype() == x.dtype(), "bias must be of x's dtype, " + text(x.dtype()));
        require(has_shape(bias, {x.size(1)}), "bias must have an element for each of the " + text(x.size(1)) +
                                                  " experts, but has shape " + shown(bias.sizes()));
    }
    require(renorm == 0 || renorm == 1, "renorm must be 0 or 1, but is " + text(renorm));
    require(norm == 0 || norm == 1 || (norm == 2 && softplus),
            "norm_type must be 0 (softmax) or 1 (sigmoid), on Ascend 950 also 2, but is " + text(norm));
    require(y.dtype() == x.dtype() && has_shape(y, {x.size(0), k}), "y must be [tokens, k] of x's dtype");
    require(expert_idx.dtype() == at::kInt && has_shape(expert_idx, {x.size(0), k}),
            "expert_idx must be int32 [tokens, k]");
    require(scores && scores.dtype() == at::kFloat && has_shape(scores, x.sizes()),
            "out must be float32 and have x's shape, " + shown(x.sizes()));
}

void check_gating(In x, In bias, int64_t k, int64_t chosen_groups, int64_t groups, int64_t group_mode, int64_t renorm,
                  int64_t norm, bool, double, double, Out y, Out expert_idx, Out scores) {
    check_gate(x, bias, k, renorm, norm, on({Chip::ascend950}), y, expert_idx, scores);
    check_groups(x.size(1), k, chosen_groups, groups, group_mode);
}

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_gating_top_k.md");
void check_hashed(In x, In bias, In ids, In table, int64_t k, int64_t, int64_t, int64_t, int64_t renorm, int64_t norm,
                  bool, double, double, Out y, Out expert_idx, Out scores) {
    check_gate(x, bias, k, renorm, norm, true, y, expert_idx, scores);
    require_dtype(ids, {at::kInt, at::kLong}, "input_ids");
    require_dtype(table, {at::kInt, at::kLong}, "tid2eid");
    require(ids && table, "input_ids and tid2eid must be given together");
    require(has_shape(ids, {x.size(0)}), "input_ids must have an element for each of the " + text(x.size(0)) +
                                             " tokens, but has shape " + shown(ids.sizes()));
    require(table.dim() == 2 && table.size(1) == k,
            "tid2eid must have shape [ids, k] with k " + text(k) + ", but has " + shown(table.sizes()));
}

at::Tensor normalise(const at::Tensor& x, int64_t norm) {
    if (norm == 0) return at::softmax(x, -1);
    return norm == 1 ? at::sigmoid(x) : at::softplus(x).sqrt();
}

// Minus infinity outside the groups with the greatest scores: their largest value, or the sum of their two largest.
at::Tensor within_groups(const at::Tensor& values, int64_t chosen, int64_t groups, int64_t mode) {
    auto grouped = values.view({values.size(0), groups, -1});
    auto scores = mode == 0 ? grouped.amax(-1) : largest(grouped, 2).first.sum(-1);
    auto kept = at::zeros(scores.sizes(), at::kBool).scatter_(1, largest(scores, chosen).second, true);
    return grouped.masked_fill(kept.logical_not().unsqueeze(-1), -INFINITY).view(values.sizes());
}

void weigh(const at::Tensor& normalized, const at::Tensor& experts, bool divides, double factor, double epsilon,
           const Out& y, const Out& expert_idx) {
    auto weights = normalized.gather(1, experts);
    if (divides) weights = weights / (weights.sum(-1, true) + epsilon);
    y.set(weights * factor);
    expert_idx.set(experts);
}

void MoeGatingTopK(In x, In bias, int64_t k, int64_t chosen_groups, int64_t groups, int64_t group_mode, int64_t renorm,
                   int64_t norm, bool with_scores, double factor, double epsilon, Out y, Out expert_idx, Out scores) {
    auto normalized = normalise(x.tensor().to(at::kFloat), norm);
    auto values = bias ? normalized + bias.tensor().to(at::kFloat) : normalized;
    if (groups > 1) values = within_groups(values, chosen_groups, groups, group_mode);
    weigh(normalized, largest(values, k).second, norm != 0 || renorm == 1, factor, epsilon, y, expert_idx);
    if (with_scores) scores.set(normalized);
}

// The experts of a token depend on its id alone; their weights are those of the gate.
UNDEFINED("a kernel would read outside its inputs");
void MoeGatingTopKV2(In x, In bias, In ids, In table, int64_t, int64_t, int64_t, int64_t, int64_t renorm, int64_t norm,
                     bool with_scores, double factor, double epsilon, Out y, Out expert_idx, Out scores) {
    auto rows = ids.tensor().to(at::kLong);
    if ((rows < 0).logical_or_(rows >= table.size(0)).any().item<bool>())
        throw std::runtime_error("input_ids must be between 0 and " + text(table.size(0) - 1) +
                                 ", the rows of tid2eid");
    auto experts = table.tensor().index_select(0, rows).to(at::kLong);
    if ((experts < 0).logical_or_(experts >= x.size(1)).any().item<bool>())
        throw std::runtime_error("tid2eid must hold experts between 0 and " + text(x.size(1) - 1));
    auto normalized = normalise(x.tensor().to(at::kFloat), norm);
    weigh(normalized, experts, norm != 0 || renorm == 1, factor, epsilon, y, expert_idx);
    if (with_scores) scores.set(normalized);
}

}  // namespace

ACLNN(MoeGatingTopKSoftmax, .check = check_softmax)
ACLNN(MoeGatingTopKSoftmaxV2, .check = check_softmax_v2)
ACLNN(MoeGatingTopK, .check = check_gating)
ACLNN(MoeGatingTopKV2, .check = check_hashed)
