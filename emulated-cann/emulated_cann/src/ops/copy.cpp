// Copies, casts and fills.
#include "numeric.h"

using namespace emulator;

DOCUMENTED("ops-math: math (the page of each operation); ops-math: conversion (the page of each operation)");

// Returns whether two tensors share memory. A copy between them reads the whole source first.
static bool overlap(const at::Tensor& a, const at::Tensor& b) {
    auto begin = [](const at::Tensor& t) { return static_cast<const char*>(t.const_data_ptr()); };
    auto end = [&](const at::Tensor& t) {
        int64_t last = 0;
        for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
        return begin(t) + (last + 1) * t.element_size();
    };
    return begin(a) < end(b) && begin(b) < end(a);
}

static void check_copy(InOut self, In source) { require_shape(self, broadcast(self.sizes(), source.sizes()), "self"); }
static void InplaceCopy(InOut self, In source) {
    if (self.tensor().numel() == 0) return;
    auto value = source.tensor();
    self.set(overlap(self.raw(), source.raw()) ? value.clone() : value);
}
ACLNN(InplaceCopy, .check = check_copy)

static void check_cast(In self, aclDataType dtype, Out out) {
    require_shape(out, self.sizes(), "out");
    require(scalar_type(dtype) == out.dtype(),
            "out must have the requested dtype, " + c10::str(scalar_type(dtype), ", not ", out.dtype()));
}
static void Cast(In self, aclDataType, Out out) { out.set(self); }
ACLNN(Cast, .check = check_cast)

static void InplaceZero(InOut self) { self.set(at::zeros({}, self.dtype())); }
ACLNN(InplaceZero)
static void InplaceOne(InOut self) { self.set(at::ones({}, self.dtype())); }
ACLNN(InplaceOne)

static void InplaceFillScalar(InOut self, Number value) { self.set(at::scalar_tensor(value, self.dtype())); }
ACLNN(InplaceFillScalar)

static void check_fill(InOut, In value) {
    require(value.tensor().numel() == 1, "value must have one element, but has shape " + shown(value.sizes()));
}
static void InplaceFillTensor(InOut self, In value) { self.set(value.tensor().reshape({})); }
ACLNN(InplaceFillTensor, .check = check_fill)

static void InplaceFillDiagonal(InOut self, Number value, bool wrap) {
    auto result = self.tensor().clone();
    self.set(result.fill_diagonal_(value, wrap));
}
ACLNN(InplaceFillDiagonal)
