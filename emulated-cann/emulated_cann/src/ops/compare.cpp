// Comparisons, logical and bitwise operations.
#include "numeric.h"

using namespace emulator;

DOCUMENTED("ops-math: math (the page of each operation); ops-math: conversion (the page of each operation)");

static void check(In self, In other, Out out) { require_shape(out, broadcast(self.sizes(), other.sizes()), "out"); }
static void check_inplace(InOut self, In other) { require_shape(self, broadcast(self.sizes(), other.sizes()), "self"); }

#define TENSOR(name, function)                                                                             \
    static void name(In self, In other, Out out) { out.set(function(self.tensor(), other.tensor())); }     \
    ACLNN(name, .check = check)                                                                            \
    static void Inplace##name(InOut self, In other) { self.set(function(self.tensor(), other.tensor())); } \
    ACLNN(Inplace##name, .check = check_inplace)

#define NUMBER(name, function)                                                                                    \
    static void name(In self, Number other, Out out) { out.set(function(self.tensor(), at::Scalar(other))); }     \
    ACLNN(name, .check = check_number)                                                                            \
    static void Inplace##name(InOut self, Number other) { self.set(function(self.tensor(), at::Scalar(other))); } \
    ACLNN(Inplace##name)

TENSOR(EqTensor, at::eq)
TENSOR(NeTensor, at::ne)
TENSOR(LtTensor, at::lt)
TENSOR(LeTensor, at::le)
TENSOR(GtTensor, at::gt)
TENSOR(GeTensor, at::ge)
NUMBER(EqScalar, at::eq)
NUMBER(NeScalar, at::ne)
NUMBER(LtScalar, at::lt)
NUMBER(LessScalar, at::lt)
NUMBER(LeScalar, at::le)
NUMBER(GtScalar, at::gt)
NUMBER(GeScalar, at::ge)
TENSOR(LogicalAnd, at::logical_and)
TENSOR(LogicalOr, at::logical_or)
TENSOR(LogicalXor, at::logical_xor)
TENSOR(BitwiseAndTensor, at::bitwise_and)
TENSOR(BitwiseOrTensor, at::bitwise_or)
TENSOR(BitwiseXorTensor, at::bitwise_xor)
NUMBER(BitwiseAndScalar, at::bitwise_and)
NUMBER(BitwiseOrScalar, at::bitwise_or)
NUMBER(BitwiseXorScalar, at::bitwise_xor)
TENSOR(LeftShift, at::bitwise_left_shift)
TENSOR(RightShift, at::bitwise_right_shift)
NUMBER(LeftShifts, at::bitwise_left_shift)

static void Equal(In self, In other, Out out) {
    out.set(at::scalar_tensor(self.sizes() == other.sizes() && at::equal(self, other), at::kBool));
}
ACLNN(Equal)
static void IsClose(In self, In other, double rtol, double atol, bool equal_nan, Out out) {
    out.set(at::isclose(self, other, rtol, atol, equal_nan));
}
ACLNN(IsClose)
static void IsInTensorScalar(In elements, Number tests, bool unique, bool invert, Out out) {
    out.set(at::isin(elements.tensor(), tests, unique, invert));
}
ACLNN(IsInTensorScalar)
static void IsInScalarTensor(Number element, In tests, bool unique, bool invert, Out out) {
    out.set(at::isin(element, tests.tensor(), unique, invert));
}
ACLNN(IsInScalarTensor)

static void check_where(In condition, In self, In other, Out out) {
    require_dtype(condition, {at::kBool, at::kByte}, "condition");
    require_shape(out, broadcast(condition.sizes(), broadcast(self.sizes(), other.sizes())), "out");
}
static void SWhere(In condition, In self, In other, Out out) {
    out.set(at::where(condition.tensor().to(at::kBool), self, other));
}
ACLNN(SWhere, .check = check_where)

static void check_masked(const InOut& self, const In& mask) {
    require_dtype(mask, {at::kBool, at::kByte}, "mask");
    require_shape(self, broadcast(self.sizes(), mask.sizes()), "self");
}
static void InplaceMaskedFillScalar(InOut self, In mask, Number value) {
    self.set(at::masked_fill(self, mask.tensor().to(at::kBool), value));
}
ACLNN(InplaceMaskedFillScalar, .check = [](InOut self, In mask, Number) { check_masked(self, mask); })
static void InplaceMaskedFillTensor(InOut self, In mask, In value) {
    auto filler = value.tensor().reshape({}).to(self.dtype());
    self.set(at::where(mask.tensor().to(at::kBool), filler, self));
}
ACLNN(
    InplaceMaskedFillTensor, .check = [](InOut self, In mask, In value) {
        check_masked(self, mask);
        require(value.tensor().numel() == 1, "value must have one element, but has shape " + shown(value.sizes()));
    })
static void InplaceMaskedScatter(InOut self, In mask, In source) {
    self.set(at::masked_scatter(self, mask.tensor().to(at::kBool), source));
}
ACLNN(InplaceMaskedScatter, .check = [](InOut self, In mask, In) { check_masked(self, mask); })
