// Products of groups of rows with a matrix each, then SwiGLU, then a quantization of each row.
#include "grouped_swiglu_quant.h"

#include "quantize.h"

namespace {

using namespace emulator;

at::Tensor rounded_to(const at::Tensor& values, int64_t type) {
    if (type == 1) return values.to(at::kHalf).to(at::kFloat);
    return type == 27 ? values.to(at::kBFloat16).to(at::kFloat) : values;
}

// The parameters of an expert: a row of one tensor, or a tensor of its own.
at::Tensor of_expert(const SwigluCall& call, const Ins& list, int64_t expert) {
    return call.single() ? list[0].tensor().select(0, expert) : list[expert].tensor();
}

at::Tensor expert_matrix(const SwigluCall& call, int64_t expert) {
    const auto& weight = call.weight[call.single() ? 0 : expert];
    auto values = weight.matrix(call.single() ? expert : 0);
    if (!call.int4_weight()) return values;
    return weight.is_transposed() ? unpack_int4(values.t()).t() : unpack_int4(values);
}

// The product of rows with an expert's matrix, times the weight's scales.
at::Tensor expert_product(const SwigluCall& call, at::Tensor x, int64_t expert) {
    auto weight = expert_matrix(call, expert), scale = scale_of(of_expert(call, call.weight_scale, expert));
    if (call.int4_x()) x = unpack_int4(x);
    // int8 x is the sum of 16 * (x >> 4), (x & 15) - 8 and 8. The assist matrix is the product of the 8.
    else if (call.int4_weight())
        x = x.to(at::kFloat) - 8;
    if (scale.dim() == 1) scale = scale.unsqueeze(0);
    int64_t size = weight.size(0) / scale.size(0);
    at::Tensor sums;
    for (int64_t group = 0; group < scale.size(0); ++group) {
        auto part = integer_product(x.narrow(1, group * size, size), weight.narrow(0, group * size, size));
        auto values = part.to(at::kFloat) * scale.select(0, group);
        sums = sums.defined() ? sums + values : values;
    }
    return call.assist.size() ? sums + of_expert(call, call.assist, expert) : sums;
}

// Rows beyond the last group keep what the memory held.
void run(const SwigluCall& call) {
    auto x = call.x.tensor();
    auto x_scale = call.x_scale.tensor();
    for (const auto& group : groups_of(call.group_list.tensor(), call.list_type, x.size(0), call.experts())) {
        if (group.rows == 0) continue;
        auto values = expert_product(call, x.narrow(0, group.begin, group.rows), group.expert);
        values = values * x_scale.narrow(0, group.begin, group.rows).unsqueeze(1);
        auto halves = rounded_to(values, call.product_type).chunk(2, 1);
        auto gated = at::silu(halves[0]) * halves[1];
        if (call.smooth) gated = gated * call.smooth.tensor().select(0, group.expert);
        auto scale = gated.abs().amax(1, true) / 127;
        auto quantized = at::round(at::where(scale == 0, 0, gated / scale)).clamp(-128, 127);
        call.y.raw().narrow(0, group.begin, group.rows).copy_(quantized);
        call.y_scale.raw().narrow(0, group.begin, group.rows).copy_(scale.squeeze(1));
    }
}

template <class Argument>
List<Argument> list_of(const Argument& argument) {
    List<Argument> list(nullptr);
    if (argument) list.items.push_back(argument);
    return list;
}

// Of the version that takes one tensor of each.
SwigluCall first(const In& x, const Weight& weight, const In& bias, const In& weight_scale, const In& x_scale,
                 const In& group_list, const Out& y, const Out& y_scale) {
    return {x, list_of(weight), list_of(weight_scale), list_of(bias), x_scale, In(nullptr), group_list, kEnds,
            y, y_scale};
}

double count(const SwigluCall& call) { return 2.0 * call.x.size(0) * call.inner() * call.columns(); }

// dequant_dtype is for Ascend 950 alone.
int64_t type_of_products(int64_t dequant_dtype) { return soc_name().starts_with("Ascend950") ? dequant_dtype : 0; }

}  // namespace

#define OPERANDS(Matrices) \
    In x, Matrices weight, In bias, In offset, In weight_scale, In x_scale, In group_list, Out y, Out y_scale, Out
#define ONE first(x, weight, bias, weight_scale, x_scale, group_list, y, y_scale)

#define FIRST(name, nz, Matrices)                                                         \
    static void check_##name(OPERANDS(Matrices)) { check_first_swiglu(ONE, nz, offset); } \
    static double flops_##name(OPERANDS(Matrices)) { return count(ONE); }                 \
    static void name(OPERANDS(Matrices)) { run(ONE); }                                    \
    ACLNN(name, .check = check_##name, .flops = flops_##name)

FIRST(GroupedMatmulSwigluQuant, false, Weight)
FIRST(GroupedMatmulSwigluQuantWeightNZ, true, NzWeight)

#define PARAMETERS                                                                                              \
    In x, Weights weight, Ins weight_scale, Ins assist, In bias, In x_scale, In smooth, In group_list,          \
        int64_t dequant_mode, int64_t dequant_dtype, int64_t quant_mode, int64_t list_type, Ints tuning, Out y, \
        Out y_scale
#define GIVEN                                                                                \
    SwigluCall {                                                                             \
        x, weight, weight_scale, assist, x_scale, smooth, group_list, list_type, y, y_scale, \
            type_of_products(dequant_dtype)                                                  \
    }

#define SECOND(name, nz)                                                                                             \
    static void check_##name(PARAMETERS) { check_second_swiglu(GIVEN, nz, bias, dequant_mode, quant_mode, tuning); } \
    static double flops_##name(PARAMETERS) { return count(GIVEN); }                                                  \
    static void name(PARAMETERS) { run(GIVEN); }                                                                     \
    ACLNN(name, .check = check_##name, .flops = flops_##name)

SECOND(GroupedMatmulSwigluQuantV2, false)
SECOND(GroupedMatmulSwigluQuantWeightNzV2, true)
