// Concatenation, splitting, repetition, padding and rearrangement.
#include "numeric.h"

using namespace emulator;

DOCUMENTED("ops-math: conversion (the page of each operation); ops-nn: index (the page of each operation)");

static void check_cat(Ins tensors, int64_t dim, Out out) {
    require(tensors.size() > 0, "the list of tensors must not be empty");
    int64_t joined = 0;
    const In* first = nullptr;
    for (auto& each : tensors.items) {
        if (each.dim() == 1 && each.size(0) == 0) continue;  // concatenates with any shape
        if (!first) first = &each;
        require(each.dim() == first->dim() && each.dim() > 0,
                "shapes " + shown(first->sizes()) + " and " + shown(each.sizes()) +
                    " cannot be concatenated along dim " + std::to_string(dim));
        int64_t wrapped = wrap(dim, each.dim());
        for (int64_t d = 0; d < each.dim(); ++d)
            require(d == wrapped || each.size(d) == first->size(d),
                    "shapes " + shown(first->sizes()) + " and " + shown(each.sizes()) +
                        " cannot be concatenated along dim " + std::to_string(dim));
        joined += each.size(wrapped);
    }
    if (!first) return;
    auto shape = first->sizes().vec();
    shape[wrap(dim, first->dim())] = joined;
    require_shape(out, shape, "out");
}
static void Cat(Ins tensors, int64_t dim, Out out) { out.set(at::cat(tensors.tensors(), dim)); }
ACLNN(Cat, .check = check_cat)
static void Stack(Ins tensors, int64_t dim, Out out) { out.set(at::stack(tensors.tensors(), dim)); }
ACLNN(Stack)
static void SplitWithSize(In self, Ints sizes, int64_t dim, Outs outs) {
    auto parts = at::split_with_sizes(self, sizes.values, dim);
    for (size_t i = 0; i < parts.size(); ++i) outs[i].set(parts[i]);
}
ACLNN(
    SplitWithSize, .check = [](In, Ints sizes, int64_t, Outs outs) {
        require(sizes.size() == outs.size(), "the numbers of sizes and outputs must be equal, but are " +
                                                 std::to_string(sizes.size()) + " and " + std::to_string(outs.size()));
    })

static void check_repeat(In self, Ints repeats, Out out) {
    require(int64_t(repeats.size()) >= self.dim(), "repeats must have at least one entry for each of the " +
                                                       std::to_string(self.dim()) + " dimensions, but has " +
                                                       std::to_string(repeats.size()));
    auto shape = repeats.values;
    for (int64_t d = 1; d <= self.dim(); ++d) shape[shape.size() - d] *= self.size(-d);
    require_shape(out, shape, "out");
}
static void Repeat(In self, Ints repeats, Out out) { out.set(self.tensor().repeat(repeats.values)); }
ACLNN(Repeat, .check = check_repeat)

static void RepeatInterleave(In self, In repeats, int64_t size, Out out) {
    out.set(at::repeat_interleave(self.tensor(), repeats.tensor(), std::nullopt, size));
}
ACLNN(RepeatInterleave)
static void RepeatInterleaveWithDim(In self, In repeats, int64_t dim, int64_t size, Out out) {
    out.set(at::repeat_interleave(self.tensor(), repeats.tensor(), dim, size));
}
ACLNN(RepeatInterleaveWithDim)
static void RepeatInterleaveInt(In self, int64_t repeats, int64_t, Out out) {
    out.set(at::repeat_interleave(self.tensor(), repeats));
}
ACLNN(RepeatInterleaveInt)
static void RepeatInterleaveIntWithDim(In self, int64_t repeats, int64_t dim, int64_t, Out out) {
    out.set(at::repeat_interleave(self.tensor(), repeats, dim));
}
ACLNN(RepeatInterleaveIntWithDim)
static void RepeatInterleaveTensor(In repeats, int64_t size, Out out) {
    out.set(at::repeat_interleave(repeats.tensor(), size));
}
ACLNN(RepeatInterleaveTensor)

static void check_same(In self, Ints, Out out) { require_shape(out, self.sizes(), "out"); }
static void Flip(In self, Ints dims, Out out) { out.set(at::flip(self, dims.values)); }
ACLNN(Flip, .check = check_same)
static void Roll(In self, Ints shifts, Ints dims, Out out) { out.set(at::roll(self, shifts.values, dims.values)); }
ACLNN(Roll)
static void ChannelShuffle(In self, int64_t groups, Out out) { out.set(at::channel_shuffle(self, groups)); }
ACLNN(ChannelShuffle)
static void StridedSlice(In self, Ints begin, Ints end, Ints strides, Out out) {
    auto part = self.tensor();
    for (size_t d = 0; d < begin.size(); ++d) part = part.slice(d, begin[d], end[d], strides ? strides[d] : 1);
    out.set(part);
}
ACLNN(StridedSlice)

static void check_pad(In self, Ints pad, Number, Out out) {
    require(pad.size() % 2 == 0 && int64_t(pad.size()) <= 2 * self.dim(),
            "pad must have an even number of values, at most " + std::to_string(2 * self.dim()) + ", but has " +
                std::to_string(pad.size()));
    auto shape = self.sizes().vec();
    for (size_t i = 0; i < pad.size() / 2; ++i) shape[shape.size() - 1 - i] += pad[2 * i] + pad[2 * i + 1];
    require_shape(out, shape, "out");
}
static void ConstantPadNd(In self, Ints pad, Number value, Out out) {
    out.set(at::constant_pad_nd(self, pad.values, value));
}
ACLNN(ConstantPadNd, .check = check_pad)

#define PAD(name, function)                                                                       \
    static void name(In self, Ints padding, Out out) { out.set(function(self, padding.values)); } \
    ACLNN(name)
PAD(ReflectionPad1d, at::reflection_pad1d)
PAD(ReflectionPad2d, at::reflection_pad2d)
PAD(ReflectionPad3d, at::reflection_pad3d)
PAD(ReplicationPad1d, at::replication_pad1d)
PAD(ReplicationPad2d, at::replication_pad2d)
PAD(ReplicationPad3d, at::replication_pad3d)

#define TRIANGLE(name, function)                                                                     \
    static void name(In self, int64_t diagonal, Out out) { out.set(function(self, diagonal)); }      \
    ACLNN(name, .check = [](In self, int64_t, Out out) { require_shape(out, self.sizes(), "out"); }) \
    static void Inplace##name(InOut self, int64_t diagonal) { self.set(function(self, diagonal)); }  \
    ACLNN(Inplace##name)
TRIANGLE(Triu, at::triu)
TRIANGLE(Tril, at::tril)

static void ChunkCat(Ins tensors, int64_t dim, int64_t chunks, Out out) {
    out.set(at::_chunk_cat(tensors.tensors(), dim, chunks));
}
ACLNN(ChunkCat)
static void UnfoldGrad(In grad, Ints sizes, int64_t dim, int64_t size, int64_t step, Out out) {
    out.set(at::unfold_backward(widen(grad), sizes.values, dim, size, step));
}
ACLNN(UnfoldGrad)
static void Im2col(In self, Ints kernel, Ints dilation, Ints padding, Ints stride, Out out) {
    out.set(at::im2col(self, kernel.values, dilation.values, padding.values, stride.values));
}
ACLNN(Im2col)
