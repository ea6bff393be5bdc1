// Pooling with windows and to given sizes, and its gradients.
#include "numeric.h"

using namespace emulator;

static std::optional<int64_t> divisor_of(int64_t divisor) {
    return divisor ? std::optional<int64_t>(divisor) : std::nullopt;
}

static void AvgPool2d(In self, Ints kernel, Ints stride, Ints padding, bool ceil_mode, bool count_pad, int64_t divisor,
                      int8_t, Out out) {
    out.set(at::avg_pool2d(widen(self), kernel.values, stride.values, padding.values, ceil_mode, count_pad,
                           divisor_of(divisor)));
}
ACLNN(AvgPool2d, .check = floating_first)
static void AvgPool2dBackward(In grad, In self, Ints kernel, Ints stride, Ints padding, bool ceil_mode, bool count_pad,
                              int64_t divisor, int8_t, Out out) {
    out.set(at::avg_pool2d_backward(widen(grad), widen(self), kernel.values, stride.values, padding.values, ceil_mode,
                                    count_pad, divisor_of(divisor)));
}
ACLNN(AvgPool2dBackward, .check = floating_first)
static void AvgPool3d(In self, Ints kernel, Ints stride, Ints padding, bool ceil_mode, bool count_pad, int64_t divisor,
                      Out out) {
    out.set(at::avg_pool3d(widen(self), kernel.values, stride.values, padding.values, ceil_mode, count_pad,
                           divisor_of(divisor)));
}
ACLNN(AvgPool3d, .check = floating_first)

#define ADAPTIVE(name, function)                                                                   \
    static void name(In self, Ints size, Out out) { out.set(function(widen(self), size.values)); } \
    ACLNN(name, .check = floating_first)
ADAPTIVE(AdaptiveAvgPool2d, at::_adaptive_avg_pool2d)
ADAPTIVE(AdaptiveAvgPool3d, at::_adaptive_avg_pool3d)

static void AdaptiveAvgPool2dBackward(In grad, In self, Out out) {
    out.set(at::_adaptive_avg_pool2d_backward(widen(grad), widen(self)));
}
ACLNN(AdaptiveAvgPool2dBackward, .check = floating_first)

#define ADAPTIVE_MAX(name, function)                                 \
    static void name(In self, Ints size, Out out, Out indices) {     \
        auto [values, where] = function(widen(self), size.values); \
        out.set(values);                                             \
        indices.set(where);                                          \
    }                                                                \
    ACLNN(name, .check = floating_first)
ADAPTIVE_MAX(AdaptiveMaxPool2d, at::adaptive_max_pool2d)
ADAPTIVE_MAX(AdaptiveMaxPool3d, at::adaptive_max_pool3d)

#define MAXIMUM(name, function)                                                                                    \
    static void name(In self, Ints kernel, Ints stride, Ints padding, Ints dilation, bool ceil_mode, Out out,      \
                     Out indices) {                                                                                \
        auto [values, where] =                                                                                     \
            function(widen(self), kernel.values, stride.values, padding.values, dilation.values, ceil_mode);       \
        out.set(values);                                                                                           \
        indices.set(where);                                                                                        \
    }                                                                                                              \
    ACLNN(name, .check = floating_first)                                                                           \
    static void name##Backward(In grad, In self, In indices, Ints kernel, Ints stride, Ints padding, Ints dilation, \
                               bool ceil_mode, Out out) {                                                          \
        out.set(function##_backward(widen(grad), widen(self), kernel.values, stride.values, padding.values,        \
                                    dilation.values, ceil_mode, indices.tensor().to(at::kLong)));                  \
    }                                                                                                              \
    ACLNN(name##Backward, .check = floating_first)
MAXIMUM(MaxPool2dWithIndices, at::max_pool2d_with_indices)
MAXIMUM(MaxPool3dWithArgmax, at::max_pool3d_with_indices)

// The positions of windows along a dimension, as a column or a row.
static at::Tensor starts(int64_t count, int64_t stride, int64_t padding, bool column) {
    auto all = at::arange(count, at::kLong) * stride - padding;
    return column ? all.unsqueeze(1) : all;
}
// mask [..., kernel positions, bytes] is 1 where an output has its maximum at a position of its window, with a byte for
// each output. The documents give the shape, but not the layout.
static void MaxPool2dWithMask(In self, Ints kernel, Ints stride, Ints padding, Ints dilation, bool ceil_mode, Out out,
                              Out mask) {
    auto [values, where] = at::max_pool2d_with_indices(widen(self), kernel.values, stride.values, padding.values,
                                                       dilation.values, ceil_mode);
    out.set(values);
    int64_t rows = values.size(-2), columns = values.size(-1), width = self.size(-1);
    auto row = where.floor_divide(width) - starts(rows, stride[0], padding[0], true);
    auto column = where.remainder(width) - starts(columns, stride[1], padding[1], false);
    auto position = row.floor_divide(dilation[0]) * kernel[1] + column.floor_divide(dilation[1]);
    auto chosen = at::zeros(mask.sizes(), at::kChar);
    auto kinds = at::arange(kernel[0] * kernel[1], at::kLong).unsqueeze(1);
    chosen.narrow(-1, 0, rows * columns).copy_(position.flatten(-2).unsqueeze(-2).eq(kinds));
    mask.set(chosen);
}
ACLNN(MaxPool2dWithMask, .check = floating_first)
static void MaxPool2dWithMaskBackward(In grad, In self, In mask, Ints kernel, Ints stride, Ints padding, Ints dilation,
                                      bool ceil_mode, Out out) {
    int64_t rows = grad.size(-2), columns = grad.size(-1);
    auto position = mask.tensor().narrow(-1, 0, rows * columns).argmax(-2).view(grad.sizes());
    auto row = position.floor_divide(kernel[1]) * dilation[0] + starts(rows, stride[0], padding[0], true);
    auto column = position.remainder(kernel[1]) * dilation[1] + starts(columns, stride[1], padding[1], false);
    out.set(at::max_pool2d_with_indices_backward(widen(grad), widen(self), kernel.values, stride.values, padding.values,
                                                 dilation.values, ceil_mode, row * self.size(-1) + column));
}
ACLNN(MaxPool2dWithMaskBackward, .check = floating_first)

static void MaxUnpool2d(In self, In indices, Ints size, Out out) {
    out.set(at::max_unpool2d(widen(self), indices.tensor().to(at::kLong), size.values));
}
ACLNN(MaxUnpool2d, .check = floating_first)
static void MaxUnpool3d(In self, In indices, Ints size, Ints stride, Ints padding, Out out) {
    out.set(at::max_unpool3d(widen(self), indices.tensor().to(at::kLong), size.values, stride.values, padding.values));
}
ACLNN(MaxUnpool3d, .check = floating_first)
