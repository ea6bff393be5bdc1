// Activation functions, clamps and interpolations.
#include "numeric.h"

using namespace emulator;

DOCUMENTED("ops-nn: activation (the page of each operation); ops-math: math (the page of each operation)");

// Requires the dtypes that the documents of these functions list.
static void floating(In self, Out out) {
    require_dtype(self, {at::kFloat, at::kHalf, at::kBFloat16}, "self");
    require_shape(out, self.sizes(), "out");
}
static void check_relu(In self, Out out) {
    require_dtype(self, {at::kFloat, at::kHalf, at::kBFloat16, at::kChar, at::kByte, at::kInt, at::kLong}, "self");
    require_shape(out, self.sizes(), "out");
}

#define UNARY(name, expression, checked)                        \
    static void name(In self, Out out) { out.set(expression); } \
    ACLNN(name, .check = checked)
#define UNARY_INPLACE(name, expression, checked)                    \
    UNARY(name, expression, checked)                                \
    static void Inplace##name(InOut self) { self.set(expression); } \
    ACLNN(Inplace##name)

UNARY_INPLACE(Sigmoid, at::sigmoid(self), same_shape)
UNARY_INPLACE(Relu, at::relu(self), check_relu)
UNARY_INPLACE(Mish, at::mish(widen(self)), floating)
UNARY_INPLACE(Hardswish, at::hardswish(widen(self)), floating)
UNARY_INPLACE(Hardsigmoid, at::hardsigmoid(widen(self)), same_shape)
UNARY(Silu, at::silu(widen(self)), floating)
// aclnnGelu always uses the tanh approximation, by its document. aclnnGeluV2 supports both forms.
UNARY(Gelu, at::gelu(widen(self), "tanh"), floating)
UNARY(LogSigmoid, at::log_sigmoid(widen(self)), same_shape)
UNARY(
    FastGelu, [x = widen(self)] { return x / (1 + at::exp(-1.702 * x.abs())) * at::exp(0.851 * (x - x.abs())); }(),
    same_shape)

static void GeluV2(In self, int64_t approximate, Out out) {
    out.set(at::gelu(widen(self), approximate == 1 ? "tanh" : "none"));
}
ACLNN(
    GeluV2, .check = [](In self, int64_t approximate, Out out) {
        require(approximate == 0 || approximate == 1,
                "approximate must be 0 or 1, but is " + std::to_string(approximate));
        require_shape(out, self.sizes(), "out");
    })
static void LogSigmoidForward(In self, Out out, Out buffer) {
    out.set(at::log_sigmoid(widen(self)));
    buffer.set(at::exp(-widen(self).abs()));
}
ACLNN(LogSigmoidForward)

#define ONE(name, function)                                                                         \
    static void name(In self, Number a, Out out) { out.set(function(widen(self), at::Scalar(a))); } \
    ACLNN(name, .check = real_first)
#define ONE_INPLACE(name, function)                                                                     \
    ONE(name, function)                                                                                 \
    static void Inplace##name(InOut self, Number a) { self.set(function(widen(self), at::Scalar(a))); } \
    ACLNN(Inplace##name)
#define TWO(name, function)                                                                          \
    static void name(In self, Number a, Number b, Out out) { out.set(function(widen(self), a, b)); } \
    ACLNN(name, .check = real_first)
#define TWO_INPLACE(name, function)                                                                      \
    TWO(name, function)                                                                                  \
    static void Inplace##name(InOut self, Number a, Number b) { self.set(function(widen(self), a, b)); } \
    ACLNN(Inplace##name)

ONE_INPLACE(LeakyRelu, at::leaky_relu)
ONE_INPLACE(Celu, at::celu)
ONE(Hardshrink, at::hardshrink)
ONE(Softshrink, at::softshrink)
TWO_INPLACE(Hardtanh, at::hardtanh)
TWO_INPLACE(Threshold, at::threshold)
TWO(Softplus, at::softplus)

static void Elu(In self, Number alpha, Number scale, Number input_scale, Out out) {
    out.set(at::elu(widen(self), alpha, scale, input_scale));
}
ACLNN(Elu)
static void InplaceElu(InOut self, Number alpha, Number scale, Number input_scale) {
    self.set(at::elu(widen(self), alpha, scale, input_scale));
}
ACLNN(InplaceElu)
static void Prelu(In self, In weight, Out out) { out.set(at::_prelu_kernel(widen(self), widen(weight))); }
ACLNN(Prelu)
static void Glu(In self, int64_t dim, Out out) { out.set(at::glu(widen(self), dim)); }
ACLNN(Glu)
static void Logit(In self, double eps, Out out) {
    out.set(at::logit(widen(self), eps < 0 ? std::optional<double>() : std::optional<double>(eps)));
}
ACLNN(Logit)

static void check_clamp(In self, Number min, Number max, Out out) {
    require(min.value || max.value, "min or max is required");
    require_shape(out, self.sizes(), "out");
}
static void Clamp(In self, Number min, Number max, Out out) { out.set(at::clamp(self, min.value, max.value)); }
ACLNN(Clamp, .check = check_clamp)
static void InplaceClamp(InOut self, Number min, Number max) { self.set(at::clamp(self, min.value, max.value)); }
ACLNN(InplaceClamp)
ONE_INPLACE(ClampMin, at::clamp_min)
ONE_INPLACE(ClampMax, at::clamp_max)
static std::optional<at::Tensor> bound_tensor(const In& bound) {
    return bound ? std::optional<at::Tensor>(bound.tensor()) : std::nullopt;
}
static void ClampTensor(In self, In min, In max, Out out) { out.set(at::clamp(self, bound_tensor(min), bound_tensor(max))); }
ACLNN(ClampTensor)
static void InplaceClampTensor(InOut self, In min, In max) { self.set(at::clamp(self, bound_tensor(min), bound_tensor(max))); }
ACLNN(InplaceClampTensor)
static void ClampMinTensor(In self, In min, Out out) { out.set(at::clamp_min(self, min.tensor())); }
ACLNN(ClampMinTensor)
static void InplaceClampMinTensor(InOut self, In min) { self.set(at::clamp_min(self, min.tensor())); }
ACLNN(InplaceClampMinTensor)
static void ClampMaxTensor(In self, In max, Out out) { out.set(at::clamp_max(self, max.tensor())); }
ACLNN(ClampMaxTensor)
static void InplaceClampMaxTensor(InOut self, In max) { self.set(at::clamp_max(self, max.tensor())); }
ACLNN(InplaceClampMaxTensor)

static void Lerp(In self, In end, In weight, Out out) { out.set(at::lerp(widen(self), widen(end), widen(weight))); }
ACLNN(Lerp)
static void InplaceLerp(InOut self, In end, In weight) { self.set(at::lerp(widen(self), widen(end), widen(weight))); }
ACLNN(InplaceLerp)
static void Lerps(In self, In end, Number weight, Out out) { out.set(at::lerp(widen(self), widen(end), weight)); }
ACLNN(Lerps)
static void InplaceLerps(InOut self, In end, Number weight) { self.set(at::lerp(widen(self), widen(end), weight)); }
ACLNN(InplaceLerps)

#define FUSED(name, function)                                                     \
    static void name(In self, In tensor1, In tensor2, Number value, Out out) {    \
        out.set(function(widen(self), widen(tensor1), widen(tensor2), value));    \
    }                                                                             \
    ACLNN(name)                                                                   \
    static void Inplace##name(InOut self, In tensor1, In tensor2, Number value) { \
        self.set(function(widen(self), widen(tensor1), widen(tensor2), value));   \
    }                                                                             \
    ACLNN(Inplace##name)

FUSED(Addcmul, at::addcmul)
FUSED(Addcdiv, at::addcdiv)
