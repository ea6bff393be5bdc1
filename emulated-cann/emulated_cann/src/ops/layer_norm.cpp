// Layer, group and batch norm, computed in float32 and rounded once.
#include "numeric.h"

using namespace emulator;

DOCUMENTED("ops-nn: norm (the page of each operation)");


static void check_layer_norm(In input, Ints normalized, In weight, In bias, double, Out out, Out, Out) {
    require_dtype(input, {at::kFloat, at::kHalf, at::kBFloat16}, "input");
    require(int64_t(normalized.size()) <= input.dim() && normalized.size() > 0,
            "normalized_shape must have between 1 and input's " + std::to_string(input.dim()) +
                " dimensions, but has " + std::to_string(normalized.size()));
    for (size_t d = 0; d < normalized.size(); ++d)
        require(input.size(d - normalized.size()) == normalized[d],
                "normalized_shape must be the last dimensions of input's shape, " + shown(input.sizes()) + ", but is " +
                    shown(normalized.values));
    require_shape(weight, normalized.values, "weight");
    require_shape(bias, normalized.values, "bias");
    require_shape(out, input.sizes(), "out");
}
static void LayerNorm(In input, Ints normalized, In weight, In bias, double eps, Out out, Out mean, Out rstd) {
    auto [y, m, r] = at::native_layer_norm(widen(input), normalized.values, widen_given(weight), widen_given(bias), eps);
    out.set(y);
    mean.set(m);
    rstd.set(r);
}
ACLNN(LayerNorm, .check = check_layer_norm)
static void FastLayerNorm(In input, Ints normalized, In weight, In bias, double eps, Out out, Out mean, Out rstd) {
    LayerNorm(input, normalized, weight, bias, eps, out, mean, rstd);
}
ACLNN(FastLayerNorm, .check = check_layer_norm)

static void GroupNorm(In input, In weight, In bias, int64_t n, int64_t c, int64_t hw, int64_t groups, double eps,
                      Out out, Out mean, Out rstd) {
    auto [y, m, r] =
        at::native_group_norm(widen(input).contiguous(), widen_given(weight), widen_given(bias), n, c, hw, groups, eps);
    out.set(y);
    mean.set(m);
    rstd.set(r);
}
ACLNN(GroupNorm)

static void BatchNorm(In input, In weight, In bias, InOut running_mean, InOut running_var, bool training,
                      double momentum, double eps, Out out, Out save_mean, Out save_invstd) {
    auto mean = widen_given(running_mean), var = widen_given(running_var);  // updated in place if they are float32
    auto [y, m, r] =
        at::native_batch_norm(widen(input), widen_given(weight), widen_given(bias), mean, var, training, momentum, eps);
    out.set(y);
    if (!training) return;
    save_mean.set(m);
    save_invstd.set(r);
    if (mean) running_mean.set(*mean);
    if (var) running_var.set(*var);
}
ACLNN(BatchNorm)
