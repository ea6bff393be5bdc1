// Quantization with static scales, and with scales computed from the values.
#include "quantize.h"

namespace {

using namespace emulator;


bool is_float(const In& x) { return x.dtype() == at::kHalf || x.dtype() == at::kBFloat16 || x.dtype() == at::kFloat; }

// Returns the factors, those of one dimension broadcast along `axis`.
at::Tensor along(const In& factors, int64_t axis, int64_t dims) {
    auto values = factors.tensor().to(at::kFloat);
    if (values.dim() != 1) return values;
    std::vector<int64_t> shape(dims, 1);
    shape[axis < 0 ? axis + dims : axis] = -1;
    return values.view(shape);
}

DOCUMENTED("ops-nn: quant/quantize/docs/aclnnQuantize.md; ops-nn: quant/ascend_quant_v2/docs/aclnnAscendQuantV3.md");
void check_axis(const In& x, const In& scale, const In& zero, int64_t axis) {
    if (!is_float(x)) throw Refused("x must be float16, bfloat16 or float32, not " + text(x.dtype()));
    if (axis < -x.dim() || axis >= x.dim())
        throw Refused("axis must be in the range of x's " + std::to_string(x.dim()) + " dimensions, but is " +
                      std::to_string(axis));
    if (scale.dim() == 1 && scale.size(0) != 1 && scale.size(0) != x.size(axis))
        throw Refused("scales must have 1 element or as many as x has along axis " + std::to_string(axis) + ", " +
                      std::to_string(x.size(axis)) + ", but have " + std::to_string(scale.size(0)));
    if (scale.dim() != 1 && scale.dim() != x.dim())
        throw Refused("scales must have 1 dimension or as many as x, " + std::to_string(x.dim()) + ", but have " +
                      std::to_string(scale.dim()));
    if (zero && zero.sizes() != scale.sizes())
        throw Refused("zero_points must have the shape of scales, " + c10::str(scale.sizes(), ", not ", zero.sizes()));
}

DOCUMENTED("ops-nn: quant/quantize/docs/aclnnQuantize.md");
void check_quantize(In x, In scale, In zero, int32_t, int32_t axis, Out) {
    check_axis(x, scale, zero, axis);
    if (scale.dim() != 1) throw Refused("scales must have 1 dimension, not " + std::to_string(scale.dim()));
    if (scale.dtype() != at::kFloat && scale.dtype() != at::kBFloat16 && scale.dtype() != at::kHalf)
        throw Refused("scales must be float32, float16 or bfloat16, not " + text(scale.dtype()));
    if (scale.dtype() != at::kFloat && x.dtype() != at::kFloat && scale.dtype() != x.dtype())
        throw Refused("scales must be float32 or have x's dtype, " + text(x.dtype()) + ", not " + text(scale.dtype()));
    bool bfloat16 = zero && zero.dtype() == at::kBFloat16;
    if (bfloat16 && (x.dtype() != at::kBFloat16 || scale.dtype() != at::kBFloat16))
        throw Refused("with bfloat16 zero_points, scales and x must be bfloat16 too, not " + text(scale.dtype()) +
                      " and " + text(x.dtype()));
    if (zero && !bfloat16 && zero.dtype() != at::kInt && zero.dtype() != at::kChar && zero.dtype() != at::kByte)
        throw Refused("zero_points must be int32, int8, uint8 or bfloat16, not " + text(zero.dtype()));
}

void Quantize(In x, In scale, In zero, int32_t dtype, int32_t axis, Out y) {
    auto values = x.tensor().to(at::kFloat) / along(scale, axis, x.dim());
    if (zero) values = values + along(zero, axis, x.dim());
    store_quantized(y, values);
}

// Rounds to integers in the given mode.
at::Tensor round_to_integers(const at::Tensor& values, const Text& round) {
    if (round.value == "ceil") return at::ceil(values);
    if (round.value == "floor") return at::floor(values);
    if (round.value == "trunc") return at::trunc(values);
    return at::round(values);
}

DOCUMENTED("ops-nn: quant/ascend_quant_v2/docs/aclnnAscendQuantV3.md");
void check_ascend_quant(In x, In scale, In offset, bool, Text round, int32_t, int32_t axis, Out) {
    check_axis(x, scale, offset, axis);
    if ((axis < 0 ? axis + x.dim() : axis) < x.dim() - 2)
        throw Refused("axis must be one of x's last two dimensions, but is " + std::to_string(axis));
    if (scale.dtype() != x.dtype())
        throw Refused("scale must have x's dtype, " + text(x.dtype()) + ", not " + text(scale.dtype()));
    if (offset && offset.dtype() != scale.dtype())
        throw Refused("offset must have scale's dtype, " + text(scale.dtype()) + ", not " + text(offset.dtype()));
    if (round.value != "round" && round.value != "ceil" && round.value != "floor" && round.value != "trunc")
        throw Refused("round_mode must be 'round', 'ceil', 'floor' or 'trunc', not '" + round.value + "'");
}

void AscendQuantV3(In x, In scale, In offset, bool square, Text round, int32_t dtype, int32_t axis, Out y) {
    auto factor = along(scale, axis, x.dim());
    auto values = x.tensor().to(at::kFloat) * (square ? factor * factor : factor);
    if (offset) values = values + along(offset, axis, x.dim());
    store_quantized(y, round_to_integers(values, round));
}

DOCUMENTED("ops-nn: quant/dynamic_quant_v2/docs/aclnnDynamicQuantV2.md");
void check_dynamic(In x, In smooth, In group_ends, int32_t, Out, Out, Out) {
    if (x.dtype() != at::kHalf && x.dtype() != at::kBFloat16)
        throw Refused("x must be float16 or bfloat16, not " + text(x.dtype()));
    if (x.dim() < 2) throw Refused("x must have at least 2 dimensions, not " + std::to_string(x.dim()));
    if (!smooth) {
        if (group_ends) throw Refused("group_index requires smooth_scales");
        return;
    }
    if (smooth.dtype() != x.dtype())
        throw Refused("smooth_scales must have x's dtype, " + text(x.dtype()) + ", not " + text(smooth.dtype()));
    if (smooth.size(-1) != x.size(-1))
        throw Refused("smooth_scales must have x's last dimension, " + std::to_string(x.size(-1)) + ", but has " +
                      std::to_string(smooth.size(-1)));
    if (group_ends && (group_ends.dtype() != at::kInt || group_ends.dim() != 1 || smooth.dim() != 2 ||
                       smooth.size(0) != group_ends.size(0)))
        throw Refused("group_index must be int32 with an entry for each row of smooth_scales, not " +
                      c10::str(group_ends.dtype(), " of shape ", group_ends.sizes()));
    if (!group_ends && smooth.dim() != 1)
        throw Refused("smooth_scales without group_index must have 1 dimension, not " + std::to_string(smooth.dim()));
}

void DynamicQuantV2(In x, In smooth, In group_ends, int32_t dtype, Out y, Out scale, Out offset) {
    auto values = x.tensor().to(at::kFloat);
    if (smooth && group_ends) {
        auto rows = values.flatten(0, -2);
        values = (rows * rows_by_group(smooth, group_ends, rows.size(0))).view(values.sizes());
    } else if (smooth) {
        values = values * smooth.tensor().to(at::kFloat);
    }
    if (!offset) return quantize_rows(values, y, scale);
    double most = largest_quantized(y, values.size(-1)), steps = 2 * most + 1;
    auto max = values.amax(-1, true), min = values.amin(-1, true);
    auto scales = (max - min) / steps;
    auto offsets = most - max / scales;
    store_quantized(y, values / scales + offsets);
    scale.set(scales.squeeze(-1));
    offset.set(offsets.squeeze(-1));
}

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_anti_quant.md");
void check_anti(In x, In scale, In offset, int64_t, bool root, Out y) {
    if (x.dtype() != at::kChar && x.dtype() != at::kInt)
        throw NotEmulated("the dtype " + text(x.dtype()) + " is not emulated; int8, and int4 in int32, are");
    int64_t width = x.size(-1) * (x.dtype() == at::kInt ? 8 : 1);
    if (scale.dtype() != at::kFloat && scale.dtype() != at::kBFloat16)
        throw Refused("scale must be float32 or bfloat16, not " + text(scale.dtype()));
    if (scale.dim() != 1 || (scale.size(0) != 1 && scale.size(0) != width))
        throw Refused("scale must have 1 or " + std::to_string(width) + " elements, but has shape " +
                      c10::str(scale.sizes()));
    if (offset && (offset.dtype() != scale.dtype() || offset.sizes() != scale.sizes()))
        throw Refused("offset must have the dtype and shape of scale");
    if (y.dtype() != at::kHalf && y.dtype() != at::kBFloat16)
        throw Refused("dst_dtype must be float16 or bfloat16, not " + text(y.dtype()));
    if (root) throw NotEmulated("sqrt_mode is not emulated");
}

void AscendAntiQuant(In x, In scale, In offset, int64_t, bool, Out y) {
    auto values = x.dtype() == at::kInt ? unpack_int4(x.tensor()) : x.tensor().to(at::kFloat);
    if (offset) values = values + offset.tensor().to(at::kFloat);
    y.set(values * scale.tensor().to(at::kFloat));
}

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_group_quant.md");
void check_group(In x, In scale, In ends, In offset, int32_t, Out) {
    if (!is_float(x) || !is_float(scale)) throw Refused("x and scale must be float16, bfloat16 or float32");
    if (x.dim() != 2 || scale.dim() != 2 || scale.size(1) != x.size(1) || scale.size(0) < 1)
        throw Refused("x must have shape [rows, H] and scale [groups, H], but they have shapes " +
                      c10::str(x.sizes(), " and ", scale.sizes()));
    if ((ends.dtype() != at::kInt && ends.dtype() != at::kLong) || ends.dim() != 1 || ends.size(0) != scale.size(0))
        throw Refused("group_index must be int32 or int64, with an end for each of the " +
                      std::to_string(scale.size(0)) + " groups");
    if (offset && (offset.dtype() != scale.dtype() || offset.raw().numel() != 1))
        throw Refused("offset must have one element of the dtype of scale");
}

void GroupQuant(In x, In scale, In ends, In offset, int32_t, Out y) {
    auto groups = ends.tensor().to(at::kLong);
    UNDEFINED("the documents require that the groups are the rows of x");
    if ((groups.diff() < 0).any().item<bool>() || groups[-1].item<int64_t>() != x.size(0) ||
        groups[0].item<int64_t>() < 0)
        throw std::runtime_error("group_index must not decrease, and end at the number of rows of x");
    auto values = x.tensor().to(at::kFloat) * rows_by_group(scale.tensor(), groups, x.size(0));
    store_quantized(y, offset ? values + offset.tensor().to(at::kFloat) : values);
}

}  // namespace

ACLNN(Quantize, .check = check_quantize)
ACLNN(AscendQuantV3, .check = check_ascend_quant)
ACLNN(DynamicQuantV2, .check = check_dynamic)
ACLNN(AscendAntiQuant, .check = check_anti)
ACLNN(GroupQuant, .check = check_group)
