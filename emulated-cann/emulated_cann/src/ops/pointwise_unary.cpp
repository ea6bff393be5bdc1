// Unary elementwise operations.
#include "numeric.h"

using namespace emulator;

DOCUMENTED("ops-math: math (the page of each operation)");


#define UNARY(name, function)                                       \
    static void name(In self, Out out) { out.set(function(self)); } \
    ACLNN(name, .check = same_shape)

#define UNARY_INPLACE(name, function)                                   \
    UNARY(name, function)                                               \
    static void Inplace##name(InOut self) { self.set(function(self)); } \
    ACLNN(Inplace##name)

UNARY_INPLACE(Abs, at::abs)
UNARY_INPLACE(Neg, at::neg)
UNARY_INPLACE(Reciprocal, at::reciprocal)
UNARY_INPLACE(Sqrt, at::sqrt)
UNARY_INPLACE(Rsqrt, at::rsqrt)
UNARY_INPLACE(Exp, at::exp)
UNARY_INPLACE(Exp2, at::exp2)
UNARY_INPLACE(Expm1, at::expm1)
UNARY_INPLACE(Log, at::log)
UNARY_INPLACE(Log2, at::log2)
UNARY_INPLACE(Log10, at::log10)
UNARY_INPLACE(Log1p, at::log1p)
UNARY_INPLACE(Sin, at::sin)
UNARY_INPLACE(Cos, at::cos)
UNARY_INPLACE(Tan, at::tan)
UNARY_INPLACE(Asin, at::asin)
UNARY_INPLACE(Acos, at::acos)
UNARY_INPLACE(Atan, at::atan)
UNARY_INPLACE(Sinh, at::sinh)
UNARY_INPLACE(Cosh, at::cosh)
UNARY_INPLACE(Tanh, at::tanh)
UNARY_INPLACE(Asinh, at::asinh)
UNARY_INPLACE(Acosh, at::acosh)
UNARY_INPLACE(Atanh, at::atanh)
UNARY_INPLACE(Erf, at::erf)
UNARY_INPLACE(Erfc, at::erfc)
UNARY_INPLACE(Erfinv, at::erfinv)
UNARY_INPLACE(Floor, at::floor)
UNARY_INPLACE(Ceil, at::ceil)
UNARY_INPLACE(Round, at::round)
UNARY_INPLACE(Trunc, at::trunc)
UNARY_INPLACE(Frac, at::frac)
UNARY_INPLACE(Sinc, at::sinc)
UNARY_INPLACE(LogicalNot, at::logical_not)
UNARY_INPLACE(BitwiseNot, at::bitwise_not)
UNARY(Sign, at::sgn)
UNARY(Signbit, at::signbit)
UNARY(IsFinite, at::isfinite)
UNARY(IsNegInf, at::isneginf)
UNARY(IsPosInf, at::isposinf)

static void RoundDecimals(In self, int64_t decimals, Out out) { out.set(at::round(self.tensor(), decimals)); }
ACLNN(RoundDecimals)
static void InplaceRoundDecimals(InOut self, int64_t decimals) { self.set(at::round(self.tensor(), decimals)); }
ACLNN(InplaceRoundDecimals)

static at::Tensor nan_to_num(const In& self, float nan, float posinf, float neginf) {
    return at::nan_to_num(self, nan, posinf, neginf);
}
static void NanToNum(In self, float nan, float posinf, float neginf, Out out) {
    out.set(nan_to_num(self, nan, posinf, neginf));
}
ACLNN(NanToNum)
static void InplaceNanToNum(InOut self, float nan, float posinf, float neginf) {
    self.set(nan_to_num(self, nan, posinf, neginf));
}
ACLNN(InplaceNanToNum)
