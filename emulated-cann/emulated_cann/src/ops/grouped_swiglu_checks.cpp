// Which products with SwiGLU and quantization each product line takes.
#include "grouped_swiglu_quant.h"
#include "numeric.h"
#include "quantize.h"

namespace emulator {

namespace {


DOCUMENTED(
    "ops-transformer: gmm/grouped_matmul_swiglu_quant/docs/aclnnGroupedMatmulSwigluQuantWeightNZ.md"
    "; ops-transformer: gmm/grouped_matmul_swiglu_quant_v2/docs/aclnnGroupedMatmulSwigluQuantV2.md"
    "; ops-transformer: gmm/grouped_matmul_swiglu_quant_v2/docs/aclnnGroupedMatmulSwigluQuantWeightNzV2.md"
    "; op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_grouped_matmul_swiglu_quant_v2.md");

void check_types(const SwigluCall& call, Line line) {
    if (at::isFloat8Type(call.x.dtype())) throw NotEmulated("float8 x is not emulated");
    require(call.x.dim() == 2 && (call.x.dtype() == at::kChar || call.int4_x()),
            "x must be int8 or int4 in int32, and [M, K]");
    require(!call.int4_x() || call.int4_weight(), "int4 x needs an int4 weight");
    require(line == Line::a2_a3 || !call.int4_weight(), "int4 x and weights are for Atlas A2 and A3");
    bool transposed = call.weight[0].is_transposed();
    for (const auto& weight : call.weight.items) {
        require(weight && weight.dtype() == (call.int4_weight() ? at::kInt : at::kChar),
                "weight must be int8 or int4 in int32");
        require(weight.is_transposed() == transposed, "either all tensors of weight are transposed, or none");
    }
    require(line != Line::a2_a3 || !transposed || call.int4_x(),
            std::string("an ") + (call.int4_weight() ? "int4 weight beside int8 x" : "int8 weight") +
                " must not be transposed");
}

// Of an int8 weight for each column; of an int4 weight packed, also for groups of rows.
void check_weight_scale(const SwigluCall& call, const In& scale) {
    std::vector<int64_t> shape{call.columns()};
    if (call.single()) shape.insert(shape.begin(), call.experts());
    if (!call.int4_weight()) {
        require_dtype(scale, {at::kFloat, at::kHalf, at::kBFloat16}, "weight_scale");
        return require_shape(scale, shape, "weight_scale");
    }
    bool packed = is_packed_scale(scale);
    require(packed || (call.int4_x() && scale.dtype() == at::kFloat),
            "weight_scale of an int4 weight must be uint64 or int64, with int4 x also float32");
    if (scale.dim() != int64_t(shape.size()) + 1) return require_shape(scale, shape, "weight_scale");
    if (call.int4_x()) throw NotEmulated("weight_scale for groups of rows with int4 x is not emulated");
    int64_t groups = scale.size(-2);
    shape.insert(shape.end() - 1, groups);
    require_shape(scale, shape, "weight_scale");
    require(groups > 0 && call.inner() % groups == 0,
            "weight_scale's groups of rows must divide K = " + number(call.inner()) + ", but are " + number(groups));
}

// What int4 weights take besides.
void check_int4(const SwigluCall& call) {
    bool plain = call.int4_x();
    require(call.inner() < 20000, "K must be below 20000 with int4 weights, but is " + number(call.inner()));
    if (plain) {
        require(!call.assist.size(), "weight_assist_matrix goes with int8 x and an int4 weight");
        if (!call.smooth) return;
        require_dtype(call.smooth, {at::kFloat}, "smooth_scale");
        return require_shape(call.smooth,
                             call.smooth.dim() == 1 ? std::vector<int64_t>{call.experts()}
                                                    : std::vector<int64_t>{call.experts(), call.columns() / 2},
                             "smooth_scale");
    }
    require(!call.smooth, "smooth_scale goes with int4 x and weight");
    require(call.assist.size() == call.weight.size(),
            "int8 x with an int4 weight needs a weight_assist_matrix for each tensor of weight");
    std::vector<int64_t> shape{call.columns()};
    if (call.single()) shape.insert(shape.begin(), call.experts());
    for (const auto& assist : call.assist.items) {
        require(bool(assist), "weight_assist_matrix has an element that is null");
        require_dtype(assist, {at::kFloat}, "weight_assist_matrix");
        require_shape(assist, shape, "weight_assist_matrix");
    }
}

void check(const SwigluCall& call, Line line) {
    require(call.weight.size() && call.weight_scale.size(), "weight and weight_scale must have tensors");
    require(call.x && call.x_scale && call.group_list && call.y && call.y_scale,
            "x, x_scale, group_list and both outputs must be given");
    check_types(call, line);
    int64_t rows = call.x.size(0), inner = call.inner(), columns = call.columns(), experts = call.experts();
    bool single = call.single();
    require(call.weight_scale.size() == call.weight.size(), "weight_scale must have as many tensors as weight");
    require(call.weight.size() == 1 || !single, "several weights must have 2 dimensions each");
    for (size_t i = 0; i < call.weight.size(); ++i) {
        const auto& weight = call.weight[i];
        require(weight.dim() == (single ? 3 : 2) && call.rows(weight) == inner && call.columns(weight) == columns,
                "weight must be [E, K, N], or E tensors of [K, N], with x's K = " + number(inner) + ", but is " +
                    shown(weight.sizes()));
        require(bool(call.weight_scale[i]), "weight_scale has an element that is null");
        check_weight_scale(call, call.weight_scale[i]);
    }
    require(columns % 2 == 0, "N must be even");
    if (line == Line::a2_a3) {
        require(inner < 65536, "K must be below 65536, but is " + number(inner));
        require(columns <= 10240, "N must be at most 10240, but is " + number(columns));
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
    if (call.int4_weight()) check_int4(call);
}

}  // namespace

DOCUMENTED(
    "ops-transformer: gmm/grouped_matmul_swiglu_quant/docs/aclnnGroupedMatmulSwigluQuant.md"
    "; ops-transformer: gmm/grouped_matmul_swiglu_quant/docs/aclnnGroupedMatmulSwigluQuantWeightNZ.md");
void check_first_swiglu(const SwigluCall& call, bool weight_nz, const In& offset) {
    auto line = product_line("GroupedMatmulSwigluQuant");
    const auto& weight = call.weight[0];
    require(line == Line::a2_a3, "GroupedMatmulSwigluQuant is for Atlas A2 and A3, not for " + soc_name());
    require(!call.int4_x(), "x must be int8");
    require(!offset && (!call.assist.size() || call.int4_weight()), "bias and offset do not go with an int8 weight");
    require(weight.is_nz() || (call.int4_weight() && !weight_nz),
            std::string("an ") + (call.int4_weight() ? "int4" : "int8") + " weight must be in FRACTAL_NZ");
    require(call.single(), "weight must be [E, K, N]");
    check(call, line);
}

DOCUMENTED(
    "ops-transformer: gmm/grouped_matmul_swiglu_quant_v2/docs/aclnnGroupedMatmulSwigluQuantV2.md"
    "; ops-transformer: gmm/grouped_matmul_swiglu_quant_v2/docs/aclnnGroupedMatmulSwigluQuantWeightNzV2.md");
void check_second_swiglu(const SwigluCall& call, bool weight_nz, const In& bias, int64_t dequant_mode,
                         int64_t quant_mode, const Ints& tuning) {
    auto line = product_line("GroupedMatmulSwigluQuantV2");
    require(line != Line::inference, "GroupedMatmulSwigluQuantV2 is not for " + soc_name());
    require(!bias, "bias is reserved: there must be none");
    require(call.list_type == kEnds || call.list_type == kCounts,
            "group_list_type must be 0 (where groups end) or 1 (their sizes), but is " + number(call.list_type));
    check(call, line);
    bool nz = call.weight[0].is_nz();
    if (call.int4_weight()) {
        bool by_group = call.weight_scale[0].dim() > (call.single() ? 2 : 1);
        require(dequant_mode == int64_t(by_group),
                "dequant_mode must be 1 with a weight_scale for groups of rows, and otherwise 0, but is " +
                    number(dequant_mode));
        require(nz || !weight_nz, "weight must be in FRACTAL_NZ");
        require(!tuning.size() || (nz && call.int4_x()), "tuning_config goes with int4 x and a weight in FRACTAL_NZ");
        return;
    }
    require(!call.assist.size() && !call.smooth && !tuning.size(),
            "weight_assist_matrix, smooth_scale and tuning_config do not go with int8 x and weight");
    require(dequant_mode == 0, "dequant_mode must be 0 for int8 x and weight, but is " + number(dequant_mode));
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

}  // namespace emulator
