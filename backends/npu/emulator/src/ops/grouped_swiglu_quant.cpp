// Products of groups of int8 rows with a matrix each, then SwiGLU and quantization of each row.
#include "grouped.h"
#include "numeric.h"
#include "quantize.h"

namespace {

using namespace emulator;

std::string number(int64_t value) { return std::to_string(value); }

// The arguments of all versions.
struct Call {
    In x;
    Weights weight;
    Ins weight_scale;
    In x_scale, group_list;
    int64_t list_type;
    Out y, y_scale;
    int64_t product_type = 0;  // of the products before SwiGLU: 0 float32, 1 float16, 27 bfloat16

    bool single() const { return weight[0].dim() == 3; }
    int64_t experts() const { return single() ? weight[0].size(0) : int64_t(weight.size()); }
    int64_t columns() const { return weight[0].size(-1); }
};

at::Tensor rounded_to(const at::Tensor& values, int64_t type) {
    if (type == 1) return values.to(at::kHalf).to(at::kFloat);
    return type == 27 ? values.to(at::kBFloat16).to(at::kFloat) : values;
}

// Rows beyond the last group keep what the memory held.
void run(const Call& call) {
    auto x = call.x.tensor();
    auto x_scale = call.x_scale.tensor();
    for (const auto& group : groups_of(call.group_list.tensor(), call.list_type, x.size(0), call.experts())) {
        if (group.rows == 0) continue;
        const auto& weight = call.weight[call.single() ? 0 : group.expert];
        auto column_scale = call.single() ? call.weight_scale[0].tensor().select(0, group.expert)
                                          : call.weight_scale[group.expert].tensor();
        auto values = integer_product(x.narrow(0, group.begin, group.rows),
                                      weight.matrix(call.single() ? group.expert : 0))
                          .to(at::kFloat);
        values = values * column_scale.to(at::kFloat) * x_scale.narrow(0, group.begin, group.rows).unsqueeze(1);
        auto halves = rounded_to(values, call.product_type).chunk(2, 1);
        auto gated = at::silu(halves[0]) * halves[1];
        auto scale = gated.abs().amax(1, true) / 127;
        auto quantized = at::round(at::where(scale == 0, 0, gated / scale)).clamp(-128, 127);
        call.y.raw().narrow(0, group.begin, group.rows).copy_(quantized);
        call.y_scale.raw().narrow(0, group.begin, group.rows).copy_(scale.squeeze(1));
    }
}

// Of the version that takes one tensor of each.
Call first(const In& x, const Weight& weight, const In& weight_scale, const In& x_scale, const In& group_list,
           const Out& y, const Out& y_scale) {
    Weights weights(nullptr);
    Ins scales(nullptr);
    weights.items.push_back(weight), scales.items.push_back(weight_scale);
    return {x, weights, scales, x_scale, group_list, kEnds, y, y_scale};
}

double count(const Call& call) { return 2.0 * call.x.size(0) * call.x.size(1) * call.columns(); }

DOCUMENTED(
    "ops-transformer: gmm/grouped_matmul_swiglu_quant/docs/aclnnGroupedMatmulSwigluQuantWeightNZ.md"
    "; ops-transformer: gmm/grouped_matmul_swiglu_quant_v2/docs/aclnnGroupedMatmulSwigluQuantV2.md"
    "; ops-transformer: gmm/grouped_matmul_swiglu_quant_v2/docs/aclnnGroupedMatmulSwigluQuantWeightNzV2.md");
void check(const Call& call, Line line) {
    require(call.weight.size() && call.weight_scale.size(), "weight and weight_scale must have tensors");
    require(call.x && call.x_scale && call.group_list && call.y && call.y_scale,
            "x, x_scale, group_list and both outputs must be given");
    if (call.x.dtype() == at::kInt || call.weight[0].dtype() == at::kInt)
        throw NotEmulated("int4 x and weights are not emulated");
    if (at::isFloat8Type(call.x.dtype())) throw NotEmulated("float8 x is not emulated");
    require(call.x.dtype() == at::kChar && call.x.dim() == 2, "x must be int8 and [M, K]");
    int64_t rows = call.x.size(0), inner = call.x.size(1), columns = call.columns(), experts = call.experts();
    bool single = call.single();
    require(call.weight_scale.size() == call.weight.size(), "weight_scale must have as many tensors as weight");
    require(call.weight.size() == 1 || !single, "several weights must have 2 dimensions each");
    for (size_t i = 0; i < call.weight.size(); ++i) {
        const auto& weight = call.weight[i];
        const auto& scale = call.weight_scale[i];
        require(weight && weight.dtype() == at::kChar, "weight must be int8 where x is");
        require(weight.dim() == (single ? 3 : 2) && weight.size(-2) == inner && weight.size(-1) == columns,
                "weight must be [E, K, N], or E tensors of [K, N], with x's K = " + number(inner) + ", but is " +
                    shown(weight.sizes()));
        require_dtype(scale, {at::kFloat, at::kHalf, at::kBFloat16}, "weight_scale");
        std::vector<int64_t> shape{columns};
        if (single) shape.insert(shape.begin(), experts);
        require_shape(scale, shape, "weight_scale");
    }
    require(columns % 2 == 0, "N must be even");
    if (line == Line::a2_a3) {
        require(inner < 65536, "K must be below 65536, but is " + number(inner));
        require(columns <= 10240, "N must be at most 10240, but is " + number(columns));
        require(!call.weight[0].is_transposed(), "an int8 weight must not be transposed");
        require(rows > 0, "x must have rows");
    } else {
        require(experts <= 1024, "at most 1024 groups are possible, not " + number(experts));
    }
    require_dtype(call.x_scale, {at::kFloat}, "x_scale");
    require_shape(call.x_scale, {rows}, "x_scale");
    require_dtype(call.group_list, {at::kLong}, "group_list");
    require_shape(call.group_list, {experts}, "group_list");
    require_dtype(call.y, {at::kChar}, "output");
    require_shape(call.y, {rows, columns / 2}, "output");
    require_dtype(call.y_scale, {at::kFloat}, "output_scale");
    require_shape(call.y_scale, {rows}, "output_scale");
}

DOCUMENTED(
    "ops-transformer: gmm/grouped_matmul_swiglu_quant/docs/aclnnGroupedMatmulSwigluQuant.md"
    "; ops-transformer: gmm/grouped_matmul_swiglu_quant/docs/aclnnGroupedMatmulSwigluQuantWeightNZ.md");
void check_first(In x, Weight weight, In bias, In offset, In weight_scale, In x_scale, In group_list, Out y,
                 Out y_scale, Out) {
    auto line = product_line("GroupedMatmulSwigluQuant");
    require(line == Line::a2_a3, "GroupedMatmulSwigluQuant is for Atlas A2 and A3, not for " + soc_name());
    if (weight.dtype() == at::kInt) throw NotEmulated("int4 weights are not emulated");
    require(!bias && !offset, "bias and offset do not go with an int8 weight");
    require(weight.is_nz(), "an int8 weight must be in FRACTAL_NZ");
    require(weight.dim() == 3, "weight must be [E, K, N]");
    check(first(x, weight, weight_scale, x_scale, group_list, y, y_scale), line);
}

DOCUMENTED(
    "ops-transformer: gmm/grouped_matmul_swiglu_quant_v2/docs/aclnnGroupedMatmulSwigluQuantV2.md"
    "; ops-transformer: gmm/grouped_matmul_swiglu_quant_v2/docs/aclnnGroupedMatmulSwigluQuantWeightNzV2.md");
void check_second(const Call& call, bool weight_nz, const Ins& assist, const In& bias, const In& smooth,
                  int64_t dequant_mode, int64_t quant_mode, const Ints& tuning) {
    auto line = product_line("GroupedMatmulSwigluQuantV2");
    require(line != Line::inference, "GroupedMatmulSwigluQuantV2 is not for " + soc_name());
    require(!bias, "bias is reserved: there must be none");
    require(call.list_type == kEnds || call.list_type == kCounts,
            "group_list_type must be 0 (where groups end) or 1 (their sizes), but is " + number(call.list_type));
    check(call, line);
    require(!assist.size() && !smooth && !tuning.size(),
            "weight_assist_matrix, smooth_scale and tuning_config do not go with int8 x and weight");
    require(dequant_mode == 0, "dequant_mode must be 0 for int8 x and weight, but is " + number(dequant_mode));
    bool nz = call.weight[0].is_nz();
    if (line == Line::a2_a3) {
        require(nz, "an int8 weight must be in FRACTAL_NZ");
        return;
    }
    require(!weight_nz && !nz, "an int8 weight must be in ND");
    require(quant_mode == 0, "quant_mode must be 0 for int8 x and weight, but is " + number(quant_mode));
    require(call.product_type == 0 || call.product_type == 1 || call.product_type == 27,
            "dequant_dtype must be float32, float16 or bfloat16");
    require(call.weight.size() == 1 && call.single(), "weight must be one tensor of 3 dimensions");
}

// dequant_dtype is for Ascend 950 alone.
int64_t type_of_products(int64_t dequant_dtype) { return soc_name().starts_with("Ascend950") ? dequant_dtype : 0; }

}  // namespace

#define FIRST(name)                                                                                            \
    static double flops_##name(In x, Weight weight, In, In, In weight_scale, In x_scale, In group_list, Out y, \
                               Out y_scale, Out) {                                                             \
        return count(first(x, weight, weight_scale, x_scale, group_list, y, y_scale));                         \
    }                                                                                                          \
    static void name(In x, Weight weight, In, In, In weight_scale, In x_scale, In group_list, Out y,           \
                     Out y_scale, Out) {                                                                       \
        run(first(x, weight, weight_scale, x_scale, group_list, y, y_scale));                                  \
    }                                                                                                          \
    ACLNN(name, .check = check_first, .flops = flops_##name)

FIRST(GroupedMatmulSwigluQuant)
FIRST(GroupedMatmulSwigluQuantWeightNZ)

#define PARAMETERS                                                                                              \
    In x, Weights weight, Ins weight_scale, Ins assist, In bias, In x_scale, In smooth, In group_list,          \
        int64_t dequant_mode, int64_t dequant_dtype, int64_t quant_mode, int64_t list_type, Ints tuning, Out y, \
        Out y_scale
#define GIVEN \
    Call{x, weight, weight_scale, x_scale, group_list, list_type, y, y_scale, type_of_products(dequant_dtype)}

#define SECOND(name, nz)                                                                 \
    static void check_##name(PARAMETERS) {                                               \
        check_second(GIVEN, nz, assist, bias, smooth, dequant_mode, quant_mode, tuning); \
    }                                                                                    \
    static double flops_##name(PARAMETERS) { return count(GIVEN); }                      \
    static void name(PARAMETERS) { run(GIVEN); }                                         \
    ACLNN(name, .check = check_##name, .flops = flops_##name)

SECOND(GroupedMatmulSwigluQuantV2, false)
SECOND(GroupedMatmulSwigluQuantWeightNzV2, true)
