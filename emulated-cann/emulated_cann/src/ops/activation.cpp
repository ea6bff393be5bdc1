// Gated activations, and those fused with dequantization and quantization.
#include "quantize.h"

namespace {

using namespace emulator;

DOCUMENTED(
    "ops-nn: activation/swi_glu/docs/aclnnSwiGlu.md"
    "; ops-nn: activation/ge_glu_v2/docs/aclnnGeGluV3.md"
    "; ops-nn: quant/swi_glu_quant/docs/aclnnSwiGluQuantV2.md"
    "; ops-nn: quant/dequant_swiglu_quant/docs/aclnnDequantSwigluQuantV2.md");
void check_halves(const In& x, int64_t dim) {
    if (dim < -x.dim() || dim >= x.dim())
        throw Refused("dim must be in the range of the input's " + std::to_string(x.dim()) + " dimensions, but is " +
                      std::to_string(dim));
    if (x.size(dim) % 2)
        throw Refused("the size of the dimension to split must be even, but is " + std::to_string(x.size(dim)));
}

// Returns the half to activate and the linear half.
std::pair<at::Tensor, at::Tensor> halves(const at::Tensor& x, int64_t dim, bool activate_left) {
    auto parts = x.to(at::kFloat).chunk(2, dim);
    return {parts[activate_left ? 0 : 1], parts[activate_left ? 1 : 0]};
}

at::Tensor swiglu(const at::Tensor& x, int64_t dim, bool activate_left) {
    auto [gate, linear] = halves(x, dim, activate_left);
    return at::silu(gate) * linear;
}

void check_swiglu(In x, int64_t dim, Out) { check_halves(x, dim); }
void SwiGlu(In x, int64_t dim, Out y) { y.set(swiglu(x, dim, true)); }

const char* approximation(int64_t mode) { return mode == 1 ? "tanh" : "none"; }

DOCUMENTED("ops-nn: activation/ge_glu_v2/docs/aclnnGeGluV3.md");
void check_geglu(In x, int64_t dim, int64_t mode, bool, Out, Out) {
    check_halves(x, dim);
    if (mode != 0 && mode != 1)
        throw Refused("approximate must be 0 (erf) or 1 (tanh), but is " + std::to_string(mode));
}

void GeGluV3(In x, int64_t dim, int64_t mode, bool activate_left, Out y, Out gelu) {
    auto [gate, linear] = halves(x, dim, activate_left);
    auto activated = at::gelu(gate, approximation(mode));
    y.set(activated * linear);
    gelu.set(activated);
}

// Returns the end row of each group, from ends or from row counts.
at::Tensor group_ends(const In& groups, bool counts) {
    auto values = groups.tensor().to(at::kLong);
    return counts ? values.cumsum(0) : values;
}

// Returns a row of factors for each row of x, or one row for all rows if there are no groups.
at::Tensor factor_rows(const In& factors, const In& groups, bool counts, int64_t rows) {
    auto values = factors.tensor().to(at::kFloat);
    if (!groups) return values.dim() == 2 && values.size(0) == 1 ? values[0] : values;
    return rows_by_group(values.dim() == 1 ? values.unsqueeze(1) : values, group_ends(groups, counts), rows);
}

bool is_dynamic(const Text& mode) { return mode.value == "dynamic"; }

DOCUMENTED("ops-nn: quant/swi_glu_quant/docs/aclnnSwiGluQuantV2.md");
void check_swiglu_quant(In x, In smooth, In offsets, In groups, bool, Text mode, int64_t group_type, int32_t, Out y,
                        Out) {
    check_halves(x, -1);
    if (x.dim() < 2 || x.size(-1) > 8192)
        throw Refused(
            "x must have at least 2 dimensions, and its last dimension at most 8192 elements, but x has shape " +
            c10::str(x.sizes()));
    if (mode.value != "static" && mode.value != "dynamic")
        throw Refused("quant_mode must be static or dynamic, not '" + mode.value + "'");
    if (!is_dynamic(mode) && (!smooth || !offsets))
        throw Refused("static quantization requires smooth_scales and offsets");
    if (smooth && smooth.dtype() != at::kFloat)
        throw Refused(std::string("smooth_scales must be float32, not ") + c10::toString(smooth.dtype()));
    if (groups && (groups.dtype() != at::kInt || groups.dim() != 1))
        throw Refused("group_index must be int32 with 1 dimension, not " +
                      c10::str(groups.dtype(), " with ", groups.dim()));
    if (groups && smooth && smooth.size(0) != groups.size(0))
        throw Refused("smooth_scales must have a row for each of the " + std::to_string(groups.size(0)) +
                      " groups, but has " + std::to_string(smooth.size(0)));
    if (group_type != 0 && group_type != 1)
        throw Refused("group_list_type must be 0 (ends) or 1 (counts), but is " + std::to_string(group_type));
    if (y.size(-1) * 2 != x.size(-1)) throw NotEmulated("an int4 output of SwiGluQuantV2 is not emulated");
}

// The scale output is the factor of the quantization, 127 / max|row|. DynamicQuant returns the inverse.
void SwiGluQuantV2(In x, In smooth, In offsets, In groups, bool activate_left, Text mode, int64_t group_type,
                   int32_t dtype, Out y, Out scale) {
    auto values = swiglu(x, -1, activate_left).flatten(0, -2);
    if (smooth) values = values * factor_rows(smooth, groups, group_type == 1, values.size(0));
    if (!is_dynamic(mode))
        return store_quantized(
            y, (values + factor_rows(offsets, groups, group_type == 1, values.size(0))).view(y.sizes()));
    auto scales = 127 / values.abs().amax(-1, true);
    store_quantized(y, at::nan_to_num(values * scales, 0).view(y.sizes()));
    scale.set(scales.view(scale.sizes()));
}

int64_t elements(const In& tensor) { return tensor.raw().numel(); }
double bytes(const In& tensor) { return tensor ? elements(tensor) * c10::elementSize(tensor.dtype()) : 0; }

DOCUMENTED("ops-nn: quant/dequant_swiglu_quant/op_host/dequant_swiglu_quant_tiling.cpp");
// Without groups another kernel runs, which holds whole rows and takes float32 scales and offsets.
void check_without_groups(const In& x, const In& weight_scale, const In& bias, const In& quant_scale,
                          const In& quant_offset, bool is_static) {
    int64_t half = x.size(-1) / 2;
    auto check = [&](const In& factors, const std::string& name) {
        if (!factors) return;
        if (factors.dtype() != at::kFloat)
            throw Refused("without group_index, " + name + " must be float32, not " + c10::toString(factors.dtype()));
        if (elements(factors) != half && elements(factors) != 1)
            throw Refused("without group_index, " + name + " must have 1 element or H = " + std::to_string(half) +
                          ", but has " + std::to_string(elements(factors)));
    };
    check(quant_scale, "quant_scale");
    if (is_static) {
        if (!quant_offset) throw Refused("static quantization without group_index requires quant_offset");
        check(quant_offset, "quant_offset");
        if (elements(quant_offset) != elements(quant_scale))
            throw Refused("quant_offset must have as many elements as quant_scale, " +
                          std::to_string(elements(quant_scale)) + ", but has " +
                          std::to_string(elements(quant_offset)));
    }
    double row = x.size(-1) * c10::elementSize(x.dtype());
    double held = bytes(weight_scale) + bytes(bias) + bytes(quant_scale) + bytes(quant_offset) + 10 * row;
    if (held >= 192 * 1024)
        throw Refused(
            "without group_index, 10 rows of x and all scales and offsets must take less than 196608 bytes together, "
            "but take " +
            std::to_string(int64_t(held)) + " bytes");
}

DOCUMENTED("ops-nn: quant/dequant_swiglu_quant/docs/aclnnDequantSwigluQuantV2.md");
void check_dequant(In x, In weight_scale, In activation_scale, In bias, In quant_scale, In quant_offset, In groups,
                   bool, Text mode, int64_t, Text round, int64_t dim, int64_t swiglu_mode, double, double, double, Out,
                   Out) {
    check_halves(x, -1);
    if (x.dim() != 2) throw Refused("x must have shape [tokens, 2H], not " + c10::str(x.sizes()));
    if (dim != -1 && dim != 1)
        throw Refused("activate_dim must be the last dimension, -1 or 1, but is " + std::to_string(dim));
    if (x.dtype() != at::kInt && x.dtype() != at::kHalf && x.dtype() != at::kBFloat16)
        throw Refused(std::string("x must be int32, float16 or bfloat16, not ") + c10::toString(x.dtype()));
    if (x.dtype() == at::kInt && !weight_scale) throw Refused("int32 x requires weight_scale");
    if (x.dtype() != at::kInt && (activation_scale || bias))
        throw Refused("activation_scale and bias are allowed only with int32 x");
    if (mode.value != "static" && mode.value != "dynamic")
        throw Refused("quant_mode must be static or dynamic, not '" + mode.value + "'");
    if (!is_dynamic(mode) && !quant_scale) throw Refused("static quantization requires quant_scale");
    if (!groups) check_without_groups(x, weight_scale, bias, quant_scale, quant_offset, !is_dynamic(mode));
    if (groups && (groups.dtype() != at::kLong || groups.dim() != 1))
        throw Refused("group_index must be int64 with 1 dimension, not " +
                      c10::str(groups.dtype(), " with ", groups.dim()));
    DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_dequant_swiglu_quant.md");
    if (groups && (x.size(-1) / 2 > 10496 || x.size(-1) / 2 % 64))
        throw Refused("with group_index, H must be a multiple of 64 and at most 10496, but is " +
                      std::to_string(x.size(-1) / 2));
    DOCUMENTED("ops-nn: quant/dequant_swiglu_quant/docs/aclnnDequantSwigluQuantV2.md");
    if (swiglu_mode < 0 || swiglu_mode > 2)
        throw Refused("swiglu_mode must be 0, 1 or 2, but is " + std::to_string(swiglu_mode));
    if (round.value != "rint") throw Refused("round_mode must be 'rint', not '" + round.value + "'");
}

void DequantSwigluQuantV2(In x, In weight_scale, In activation_scale, In bias, In quant_scale, In quant_offset,
                          In groups, bool activate_left, Text mode, int64_t dtype, Text round, int64_t dim,
                          int64_t swiglu_mode, double limit, double alpha, double shift, Out y, Out scale) {
    int64_t rows = x.size(0);
    auto values = x.tensor();
    if (bias) values = values + (groups ? factor_rows(bias, groups, true, rows) : bias.tensor());
    values = values.to(at::kFloat);
    if (weight_scale) values = values * factor_rows(weight_scale, groups, true, rows);
    if (activation_scale) values = values * activation_scale.tensor().view({rows, 1});
    at::Tensor activated;
    if (swiglu_mode == 0) {
        activated = swiglu(values, -1, activate_left);
    } else {
        auto [gate, linear] = halves(values, -1, activate_left);
        if (swiglu_mode == 1) gate = values.slice(1, 0, {}, 2), linear = values.slice(1, 1, {}, 2);
        gate = at::clamp_max(gate, limit);
        activated = gate * at::sigmoid(gate * alpha) * (at::clamp(linear, -limit, limit) + shift);
    }
    if (is_dynamic(mode)) {
        if (quant_scale) activated = activated * factor_rows(quant_scale, groups, true, rows);
        return quantize_rows(activated, y, scale);
    }
    activated = activated / factor_rows(quant_scale, groups, true, rows);
    if (quant_offset) activated = activated + factor_rows(quant_offset, groups, true, rows);
    store_quantized(y, activated);
}

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_gelu_mul.md");
void check_gelu_mul(In x, Text form, Out y) {
    if (x.dtype() != at::kHalf && x.dtype() != at::kBFloat16 && x.dtype() != at::kFloat)
        throw Refused(std::string("input must be float16, bfloat16 or float32, not ") + c10::toString(x.dtype()));
    if (x.dim() < 2 || x.dim() > 8 || x.size(-1) % 2 || x.size(-1) > 1024 ||
        x.raw().numel() > 200000 * std::max<int64_t>(1, x.size(-1)))
        throw Refused(
            "input must have 2 to 8 dimensions, an even last one of at most 1024 and at most 200000 rows, but has "
            "shape " +
            c10::str(x.sizes()));
    if (form.value != "none" && form.value != "tanh")
        throw Refused("approximate must be none or tanh, not '" + form.value + "'");
}

void GeluMul(In x, Text form, Out y) {
    auto halves = x.tensor().to(at::kFloat).chunk(2, -1);
    y.set(at::gelu(halves[0], form.value) * halves[1]);
}

}  // namespace

ACLNN(SwiGlu, .check = check_swiglu)
ACLNN(GeGluV3, .check = check_geglu)
ACLNN(SwiGluQuantV2, .check = check_swiglu_quant)
ACLNN(DequantSwigluQuantV2, .check = check_dequant)
ACLNN(GeluMul, .check = check_gelu_mul)
