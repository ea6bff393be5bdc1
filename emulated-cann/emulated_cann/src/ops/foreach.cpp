// Operations on each tensor of a list, which optimizers call, and copies of lists, with which torch_npu fills a graph's
// inputs.
#include <cmath>

#include "numeric.h"

using namespace emulator;

DOCUMENTED("ops-nn: foreach (the page of each operation)");

template <class Targets>
static void check_lists(const Ins& source, const Targets& target) {
    require(source.size() == target.size(), "the input and output lists must have the same length, but have " +
                                                std::to_string(source.size()) + " and " +
                                                std::to_string(target.size()));
}
template <class... Rest>
static void check(Ins self, Rest... rest) {
    auto& out = std::get<sizeof...(Rest) - 1>(std::tie(rest...));
    check_lists(self, out);
    for (size_t i = 0; i < self.size(); ++i) require_shape(out[i], self[i].sizes(), "an output");
}

// aclScalarList.
struct Numbers {
    using Handle = const aclScalarList*;
    Numbers(const aclScalarList* handle) {
        for (auto* each : handle->scalars) values.push_back(each->value);
    }
    std::vector<at::Scalar> values;
};

static void ForeachCopy(Ins source, Outs target) {
    for (size_t i = 0; i < source.size(); ++i) target[i].set(source[i]);
}
ACLNN(ForeachCopy, .check = check)
static void ForeachZeroInplace(InOuts self) {
    for (auto& each : self.items) each.set(at::zeros({}, each.dtype()));
}
ACLNN(ForeachZeroInplace)
static void ForeachNorm(Ins self, Number order, Outs out) {
    for (size_t i = 0; i < self.size(); ++i) out[i].set(at::linalg_vector_norm(widen(self[i]), order));
}
ACLNN(ForeachNorm, .check = [](Ins self, Number, Outs out) { check_lists(self, out); })

#define EACH(parameters, name, ...)                                          \
    static void Foreach##name parameters {                                   \
        for (size_t i = 0; i < self.size(); ++i) out[i].set(__VA_ARGS__);    \
    }                                                                        \
    ACLNN(Foreach##name, .check = check)
#define UNARY(name, function) EACH((Ins self, Outs out), name, function(widen(self[i])))
#define PAIR(name, function) EACH((Ins self, Ins other, Outs out), name, function(widen(self[i]), widen(other[i])))
#define NUMBER(name, function) \
    EACH((Ins self, Number other, Outs out), name, function(widen(self[i]), at::Scalar(other)))
#define WITH_NUMBERS(name, function) \
    EACH((Ins self, Numbers others, Outs out), name, function(widen(self[i]), others.values[i]))
#define ARITHMETIC(name, function)     \
    NUMBER(name##ScalarV2, function)   \
    WITH_NUMBERS(name##ScalarList, function)

UNARY(Abs, at::abs)
UNARY(Acos, at::acos)
UNARY(Asin, at::asin)
UNARY(Atan, at::atan)
UNARY(Cos, at::cos)
UNARY(Cosh, at::cosh)
UNARY(Erf, at::erf)
UNARY(Erfc, at::erfc)
UNARY(Exp, at::exp)
UNARY(Expm1, at::expm1)
UNARY(Log, at::log)
UNARY(Log10, at::log10)
UNARY(Log1p, at::log1p)
UNARY(Log2, at::log2)
UNARY(Neg, at::neg)
UNARY(Reciprocal, at::reciprocal)
UNARY(Sigmoid, at::sigmoid)
UNARY(Sign, at::sign)
UNARY(Sin, at::sin)
UNARY(Sinh, at::sinh)
UNARY(Sqrt, at::sqrt)
UNARY(Tan, at::tan)
UNARY(Tanh, at::tanh)
PAIR(MulList, at::mul)
PAIR(DivList, at::div)
PAIR(MaximumList, at::maximum)
PAIR(MinimumList, at::minimum)
PAIR(PowList, at::pow)
ARITHMETIC(Add, at::add)
ARITHMETIC(Sub, at::sub)
ARITHMETIC(Mul, at::mul)
ARITHMETIC(Div, at::div)
ARITHMETIC(Pow, at::pow)
ARITHMETIC(Maximum, at::clamp_min)
ARITHMETIC(Minimum, at::clamp_max)

EACH((Ins self, Ins other, Number alpha, Outs out), AddListV2, at::add(widen(self[i]), widen(other[i]), alpha))
EACH((Ins self, Ins other, Number alpha, Outs out), SubListV2, at::sub(widen(self[i]), widen(other[i]), alpha))
EACH((Ins self, Ins end, Ins weight, Outs out), LerpList, at::lerp(widen(self[i]), widen(end[i]), widen(weight[i])))
EACH((Ins self, Ins end, Number weight, Outs out), LerpScalar, at::lerp(widen(self[i]), widen(end[i]), weight))

#define FUSED(name, function)                                                        \
    EACH((Ins self, Ins first, Ins second, Number value, Outs out), name##ScalarV2,  \
         function(widen(self[i]), widen(first[i]), widen(second[i]), value))         \
    EACH((Ins self, Ins first, Ins second, Numbers values, Outs out), name##ScalarList, \
         function(widen(self[i]), widen(first[i]), widen(second[i]), values.values[i]))
FUSED(Addcmul, at::addcmul)
FUSED(Addcdiv, at::addcdiv)

// One step of AdamW. `step` counts the steps before this one.
static void ApplyAdamWV2(InOut self, InOut mean, InOut square, InOut largest, In grad, In step, float rate,
                         float beta1, float beta2, float decay, float eps, bool amsgrad, bool maximize) {
    auto gradient = maximize ? at::neg(widen(grad)) : widen(grad);
    double count = step.tensor().item<double>() + 1;
    auto first = widen(mean) * beta1 + gradient * (1 - beta1);
    auto second = widen(square) * beta2 + gradient * gradient * (1 - beta2);
    auto bound = amsgrad ? at::maximum(widen(largest), second) : second;
    auto divisor = at::sqrt(bound) / std::sqrt(1 - std::pow(beta2, count)) + eps;
    self.set(widen(self) * (1 - rate * decay) - first / divisor * (rate / (1 - std::pow(beta1, count))));
    mean.set(first);
    square.set(second);
    if (amsgrad) largest.set(bound);
}
ACLNN(ApplyAdamWV2)
