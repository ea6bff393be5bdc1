// Forward passes of losses.
#include <ATen/core/Reduction.h>

#include "numeric.h"

using namespace emulator;

DOCUMENTED("ops-nn: loss (the page of each operation)");

static void check_reduction(int64_t reduction) {
    require(reduction >= at::Reduction::None && reduction < at::Reduction::END,
            "reduction must be 0 (none), 1 (mean) or 2 (sum), but is " + std::to_string(reduction));
}
static void check_pair(In self, In target, int64_t reduction, Out out) {
    check_reduction(reduction);
    auto shape = broadcast(self.sizes(), target.sizes());
    if (reduction != at::Reduction::None) shape.clear();
    require_shape(out, shape, "out");
}

static void MseLoss(In self, In target, int64_t reduction, Out out) {
    out.set(at::mse_loss(widen(self), widen(target), reduction));
}
ACLNN(MseLoss, .check = check_pair)
static void L1Loss(In self, In target, int64_t reduction, Out out) {
    out.set(at::l1_loss(widen(self), widen(target), reduction));
}
ACLNN(L1Loss, .check = check_pair)
static void SmoothL1Loss(In self, In target, int64_t reduction, float beta, Out out) {
    out.set(at::smooth_l1_loss(widen(self), widen(target), reduction, beta));
}
ACLNN(SmoothL1Loss)
static void KlDiv(In self, In target, int64_t reduction, bool log_target, Out out) {
    out.set(at::kl_div(widen(self), widen(target), reduction, log_target));
}
ACLNN(KlDiv)
static void BinaryCrossEntropy(In self, In target, In weight, int64_t reduction, Out out) {
    out.set(at::binary_cross_entropy(widen(self), widen(target), widen_given(weight), reduction));
}
ACLNN(BinaryCrossEntropy)
static void BinaryCrossEntropyWithLogits(In self, In target, In weight, In pos_weight, int64_t reduction, Out out) {
    out.set(
        at::binary_cross_entropy_with_logits(widen(self), widen(target), widen_given(weight), widen_given(pos_weight), reduction));
}
ACLNN(BinaryCrossEntropyWithLogits)

static void check_nll(In self, In target, In, int64_t reduction, int64_t, Out, Out) {
    check_reduction(reduction);
    require(self.dim() == 1 || self.dim() == 2,
            "self must have 1 or 2 dimensions, but has shape " + shown(self.sizes()));
    require_dtype(target, {at::kLong, at::kInt, at::kByte}, "target");
}
static void NLLLoss(In self, In target, In weight, int64_t reduction, int64_t ignore_index, Out out, Out total_weight) {
    auto [loss, total] =
        at::nll_loss_forward(widen(self), target.tensor().to(at::kLong), widen_given(weight), reduction, ignore_index);
    out.set(loss);
    if (reduction != at::Reduction::None) total_weight.set(total);
}
ACLNN(NLLLoss, .check = check_nll)
static void NLLLoss2d(In self, In target, In weight, int64_t reduction, int64_t ignore_index, Out out,
                      Out total_weight) {
    auto [loss, total] =
        at::nll_loss2d_forward(widen(self), target.tensor().to(at::kLong), widen_given(weight), reduction, ignore_index);
    out.set(loss);
    if (reduction != at::Reduction::None) total_weight.set(total);
}
ACLNN(NLLLoss2d, .check = floating_first)
static void SoftMarginLoss(In self, In target, int64_t reduction, Out out) {
    out.set(at::soft_margin_loss(widen(self), widen(target), reduction));
}
ACLNN(SoftMarginLoss, .check = floating_first)
static void MultilabelMarginLoss(In self, In target, int64_t reduction, Out out, Out is_target) {
    auto [loss, chosen] =
        at::multilabel_margin_loss_forward(widen(self), target.tensor().to(at::kLong), reduction);
    out.set(loss);
    is_target.set(chosen);
}
ACLNN(MultilabelMarginLoss, .check = floating_first)
static void CtcLoss(In log_probs, In targets, Ints input_lengths, Ints target_lengths, int64_t blank,
                    bool zero_infinity, Out out, Out log_alpha) {
    auto [loss, alpha] = at::_ctc_loss(widen(log_probs), targets.tensor().to(at::kLong), input_lengths.values,
                                       target_lengths.values, blank, zero_infinity);
    out.set(loss);
    log_alpha.set(at::constant_pad_nd(alpha, {0, log_alpha.size(-1) - alpha.size(-1)}));  // to a multiple of 8
}
ACLNN(CtcLoss, .check = floating_first)
