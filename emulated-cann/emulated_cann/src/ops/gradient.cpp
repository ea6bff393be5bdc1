// Gradients of activations, norms, losses, convolutions and embeddings, computed in float32 and rounded once.
#include <ATen/core/Reduction.h>

#include "numeric.h"

using namespace emulator;

static std::array<bool, 3> mask_of(const Bools& mask) { return {mask[0], mask[1], mask[2]}; }
// Sets the outputs whose gradients the mask requests; ATen leaves the others undefined.
static void set_all(const std::tuple<at::Tensor, at::Tensor, at::Tensor>& gradients, const Out& first,
                    const Out& second, const Out& third) {
    auto set = [](const Out& out, const at::Tensor& value) {
        if (value.defined()) out.set(value);
    };
    set(first, std::get<0>(gradients));
    set(second, std::get<1>(gradients));
    set(third, std::get<2>(gradients));
}

// `other` is the operation's input or its result.
#define UNARY(name, function)                                                                            \
    static void name(In grad, In other, Out out) { out.set(function(widen(grad), widen(other))); } \
    ACLNN(name, .check = floating_first)
UNARY(SiluBackward, at::silu_backward)
UNARY(SigmoidBackward, at::sigmoid_backward)
UNARY(TanhBackward, at::tanh_backward)
UNARY(HardswishBackward, at::hardswish_backward)
UNARY(HardswishBackwardV2, at::hardswish_backward)
UNARY(HardsigmoidBackward, at::hardsigmoid_backward)

#define ALONG(name, function)                                                                       \
    static void name(In grad, In result, int64_t dim, Out out) {                                    \
        out.set(function(widen(grad), widen(result), dim, at::kFloat));                             \
    }                                                                                               \
    ACLNN(name, .check = floating_first)
ALONG(SoftmaxBackward, at::_softmax_backward_data)
ALONG(LogSoftmaxBackward, at::_log_softmax_backward_data)

static void GeluBackward(In grad, In self, Out out) { out.set(at::gelu_backward(widen(grad), widen(self), "tanh")); }
ACLNN(GeluBackward, .check = floating_first)
static void GeluBackwardV2(In grad, In self, Text approximate, Out out) {
    out.set(at::gelu_backward(widen(grad), widen(self), approximate.value));
}
ACLNN(GeluBackwardV2, .check = floating_first)
static void ThresholdBackward(In grad, In self, Number threshold, Out out) {
    out.set(at::threshold_backward(widen(grad), widen(self), threshold));
}
ACLNN(ThresholdBackward, .check = floating_first)
static void LeakyReluBackward(In grad, In self, Number slope, bool is_result, Out out) {
    out.set(at::leaky_relu_backward(widen(grad), widen(self), slope, is_result));
}
ACLNN(LeakyReluBackward, .check = floating_first)
static void EluBackward(In grad, Number alpha, Number scale, Number input_scale, bool is_result, In other, Out out) {
    out.set(at::elu_backward(widen(grad), alpha, scale, input_scale, is_result, widen(other)));
}
ACLNN(EluBackward, .check = floating_first)
static void SoftplusBackward(In grad, In self, Number beta, Number threshold, Out out) {
    out.set(at::softplus_backward(widen(grad), widen(self), beta, threshold));
}
ACLNN(SoftplusBackward, .check = floating_first)
static void LogSigmoidBackward(In grad, In self, In, Out out) {  // torch_npu leaves the buffer empty
    out.set(at::log_sigmoid_backward(widen(grad), widen(self), at::exp(-widen(self).abs())));
}
ACLNN(LogSigmoidBackward, .check = floating_first)
static void GluBackward(In grad, In self, int64_t dim, Out out) {
    out.set(at::glu_backward(widen(grad), widen(self), dim));
}
ACLNN(GluBackward, .check = floating_first)
static void SwiGluGrad(In grad, In self, int64_t dim, Out out) {
    auto parts = widen(self).chunk(2, dim);
    auto above = widen(grad);
    out.set(at::cat({at::silu_backward(above * parts[1], parts[0]), above * at::silu(parts[0])}, dim));
}
ACLNN(SwiGluGrad, .check = floating_first)

static void LayerNormBackward(In grad, In input, Ints normalized, In mean, In rstd, In weight, In bias, Bools mask,
                              Out grad_input, Out grad_weight, Out grad_bias) {
    set_all(at::native_layer_norm_backward(widen(grad), widen(input), normalized.values, mean, rstd, widen_given(weight),
                                           widen_given(bias), mask_of(mask)),
            grad_input, grad_weight, grad_bias);
}
ACLNN(LayerNormBackward, .check = floating_first)
static void GroupNormBackward(In grad, In input, In mean, In rstd, In weight, int64_t n, int64_t c, int64_t hw,
                              int64_t groups, Bools mask, Out grad_input, Out grad_weight, Out grad_bias) {
    set_all(at::native_group_norm_backward(widen(grad).contiguous(), widen(input).contiguous(), widen(mean),
                                           widen(rstd), widen_given(weight), n, c, hw, groups, mask_of(mask)),
            grad_input, grad_weight, grad_bias);
}
ACLNN(GroupNormBackward, .check = floating_first)
static void BatchNormBackward(In grad, In input, In weight, In running_mean, In running_var, In mean, In rstd,
                              bool training, double eps, Bools mask, Out grad_input, Out grad_weight, Out grad_bias) {
    set_all(at::native_batch_norm_backward(widen(grad), widen(input), widen_given(weight), widen_given(running_mean),
                                           widen_given(running_var), widen_given(mean), widen_given(rstd), training, eps, mask_of(mask)),
            grad_input, grad_weight, grad_bias);
}
ACLNN(BatchNormBackward, .check = floating_first)
static void RmsNormGrad(In grad, In input, In rstd, In weight, Out grad_input, Out grad_weight) {
    std::vector<int64_t> normalized, others;
    for (int64_t d = 0; d < input.dim(); ++d) (d < input.dim() - weight.dim() ? others : normalized).push_back(d);
    auto above = widen(grad), normed = widen(input) * widen(rstd), scaled = above * widen(weight);
    grad_input.set(widen(rstd) * (scaled - normed * (scaled * normed).mean(normalized, true)));
    grad_weight.set(others.empty() ? above * normed : (above * normed).sum(others));
}
ACLNN(RmsNormGrad, .check = floating_first)

static void ConvolutionBackward(In grad, In input, In weight, Ints bias, Ints stride, Ints padding, Ints dilation,
                                bool transposed, Ints output_padding, int64_t groups, Bools mask, int8_t,
                                Out grad_input, Out grad_weight, Out grad_bias) {
    auto sizes = bias ? at::OptionalIntArrayRef(bias.values) : at::OptionalIntArrayRef();
    set_all(at::convolution_backward(widen(grad), widen(input), widen(weight), sizes, stride.values, padding.values,
                                     dilation.values, transposed, output_padding.values, groups, mask_of(mask)),
            grad_input, grad_weight, grad_bias);
}
ACLNN(ConvolutionBackward, .check = floating_first)
static void EmbeddingDenseBackward(In grad, In indices, uint64_t rows, uint64_t padding, bool scale, Out out) {
    out.set(at::embedding_dense_backward(widen(grad), indices.tensor().to(at::kLong), rows, padding, scale));
}
ACLNN(EmbeddingDenseBackward, .check = floating_first)

static void NLLLossBackward(In grad, In self, In target, In weight, int64_t reduction, int64_t ignored, In total,
                            Out out) {
    out.set(at::nll_loss_backward(widen(grad), widen(self), target.tensor().to(at::kLong), widen_given(weight), reduction,
                                  ignored, widen(total)));
}
ACLNN(NLLLossBackward, .check = floating_first)
static void NLLLoss2dBackward(In grad, In self, In target, In weight, int64_t reduction, int64_t ignored, In total,
                              Out out) {
    out.set(at::nll_loss2d_backward(widen(grad), widen(self), target.tensor().to(at::kLong), widen_given(weight), reduction,
                                    ignored, widen(total)));
}
ACLNN(NLLLoss2dBackward, .check = floating_first)
static void MseLossBackward(In grad, In self, In target, int64_t reduction, Out out) {
    out.set(at::mse_loss_backward(widen(grad), widen(self), widen(target), reduction));
}
ACLNN(MseLossBackward, .check = floating_first)
static void SmoothL1LossBackward(In grad, In self, In target, int64_t reduction, float beta, Out out) {
    out.set(at::smooth_l1_loss_backward(widen(grad), widen(self), widen(target), reduction, beta));
}
ACLNN(SmoothL1LossBackward, .check = floating_first)
static void L1LossBackward(In grad, In self, In target, int64_t reduction, Out out) {
    auto sign = at::sign(widen(self) - widen(target));
    out.set(sign * widen(grad) / (reduction == at::Reduction::Mean ? sign.numel() : 1));
}
ACLNN(L1LossBackward, .check = floating_first)
static void BinaryCrossEntropyBackward(In grad, In self, In target, In weight, int64_t reduction, Out out) {
    out.set(at::binary_cross_entropy_backward(widen(grad), widen(self), widen(target), widen_given(weight), reduction));
}
ACLNN(BinaryCrossEntropyBackward, .check = floating_first)
