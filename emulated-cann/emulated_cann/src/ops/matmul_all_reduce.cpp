// Matrix products with an all-reduce in the same launch.
#include "fused_collective.h"
#include "quantize.h"

namespace {

using namespace emulator;


DOCUMENTED(
    "ops-transformer: mc2/matmul_all_reduce/docs/aclnnMatmulAllReduce.md"
    "; ops-transformer: mc2/matmul_all_reduce/docs/aclnnMatmulAllReduceV2.md"
    "; ops-transformer: mc2/matmul_all_reduce/docs/aclnnMatmulAllReduceV3.md");
void check_common(const In& x1, const In& x2, const In& x3, const Text& reduction, int64_t turn, int64_t mode,
                  const Out& out) {
    require_product("an all-reduce of a matrix product", {Product::a2, Product::ascend950});
    require(x1.dim() == 2 || x1.dim() == 3, "x1 must have 2 or 3 dimensions, but has shape " + shown(x1.sizes()));
    require(x2.dim() == 2, "x2 must have 2 dimensions, but has shape " + shown(x2.sizes()));
    require(is_empty(x1) || x1.raw().is_contiguous(), "x1 must be contiguous; only x2 may be transposed");
    bool is_dense = is_empty(x2) || x2.format() == ACL_FORMAT_FRACTAL_NZ || x2.raw().is_contiguous() ||
                    x2.raw().t().is_contiguous();
    require(is_dense, "x2 must be contiguous, or the transpose of a contiguous tensor");
    require(x1.size(-1) == x2.size(0), "x1 must have as many columns as x2 has rows, but they have shapes " +
                                           shown(x1.sizes()) + " and " + shown(x2.sizes()));
    auto shape = x1.sizes().vec();
    shape.back() = x2.size(1);
    require_shape(out, shape, "output");
    require_shape(x3, shape, "x3");
    require(!is_given(x3) || x3.dtype() == out.dtype(), "x3 must have the dtype of the output, " + text(out.dtype()));
    require(reduction.value == "sum", "reduce_op must be sum, but is " + reduction.value);
    require(mode == 1, "streamMode must be 1, but is " + text(mode));
    require_tiling(turn == 0, "comm_turn must be 0, but is " + text(turn));
}

void require_group(const Communicator& communicator) {
    if (product() == Product::ascend950) return require_ranks(communicator, {1, 2, 4, 8, 16, 32, 64});
    require_ranks(communicator, {1, 2, 4, 8});
}

void check_float(const In& x1, const In& x2, const In& bias, const In& x3, const Text& reduction, int64_t turn,
                 int64_t mode, const Out& out) {
    check_common(x1, x2, x3, reduction, turn, mode, out);
    require_dtype(x1, {at::kHalf, at::kBFloat16}, "x1");
    require(x2.dtype() == x1.dtype() && out.dtype() == x1.dtype(), "x2 and the output must have the dtype of x1, " +
                                                                       text(x1.dtype()) + ", but are " +
                                                                       text(x2.dtype()) + " and " + text(out.dtype()));
    require(x2.format() != ACL_FORMAT_FRACTAL_NZ, "x2 must not be in FRACTAL_NZ, unless it is int8");
    if (!bias) return;
    require_shape(bias, {out.size(-1)}, "bias");
    require(bias.dtype() == x1.dtype(), "bias must have the dtype of x1, " + text(x1.dtype()));
}

// All-reduces the tensor of the output's shape that `product` returns. Rounds it to the output's dtype, then adds x3.
Fused all_reduce(const Text& group, const In& x3, const Out& out, std::function<at::Tensor()> product) {
    if (is_empty(out)) return {};
    Fused made{find_group(group), collective_of(out.dtype(), elements_of(out), true)};
    require_group(*made.communicator);
    set_bytes(made.collective, elements_of(out) * c10::elementSize(out.dtype()));
    require_agreement(made.collective, {{"the number of columns of x2", out.size(-1)}});
    made.collective.put = [=](char* slot) {
        auto sum = product().to(out.dtype());
        if (is_given(x3)) sum = widen(sum) + widen(x3);
        in_slot(slot, out.sizes(), out.dtype()).copy_(sum);
    };
    made.collective.take = [=](const Turn& turn) { out.set(sum_of_ranks(turn, 0, out.sizes(), out.dtype())); };
    return made;
}

double count(const In& x1, const Out& out) { return 2.0 * elements_of(out) * x1.size(-1); }

#define PRODUCT(name, parameters, x3, ...)                         \
    void check_##name parameters {                                 \
        check_float(x1, x2, bias, x3, reduction, turn, mode, out); \
        __VA_ARGS__                                                \
    }                                                              \
    double count_##name parameters { return count(x1, out); }      \
    Fused name parameters {                                        \
        return all_reduce(group, x3, out, [=] {                    \
            auto product = at::matmul(widen(x1), widen(x2));       \
            return bias ? product + widen(bias) : product;         \
        });                                                        \
    }

PRODUCT(MatmulAllReduce, (In x1, In x2, In bias, Text group, Text reduction, int64_t turn, int64_t mode, Out out),
        In(nullptr))
PRODUCT(MatmulAllReduceV2,
        (In x1, In x2, In bias, In x3, Text group, Text reduction, int64_t turn, int64_t mode, Out out), x3)
PRODUCT(MatmulAllReduceV3,
        (In x1, In x2, In bias, In x3, Text group, Text reduction, Text engine, int64_t turn, int64_t mode, Out out),
        x3, bool has_ccu = product() == Product::ascend950;
        require_tiling(engine.value == "ai_cpu" || (has_ccu && engine.value == "ccu"),
                       "comm_mode must be ai_cpu, on Ascend 950 ai_cpu or ccu, but is " + engine.value);)

DOCUMENTED(
    "ops-transformer: mc2/matmul_all_reduce/docs/aclnnQuantMatmulAllReduce.md"
    "; ops-transformer: mc2/matmul_all_reduce/docs/aclnnQuantMatmulAllReduceV2.md");
void check_quantized(const In& x1, const In& x2, const In& bias, const In& x3, const In& scale, const In& row_scale,
                     const Text& reduction, int64_t turn, int64_t mode, const Out& out) {
    check_common(x1, x2, x3, reduction, turn, mode, out);
    require(!is_empty(x1) && !is_empty(x2), "int8 x1 and x2 must not be empty");
    require_dtype(x1, {at::kChar}, "x1");
    require_dtype(x2, {at::kChar}, "x2");
    require_dtype(out, {at::kHalf, at::kBFloat16}, "the output");
    require(x2.format() != ACL_FORMAT_FRACTAL_NZ || product() == Product::a2, "x2 in FRACTAL_NZ requires Atlas A2");
    int64_t columns = out.size(-1);
    bool is_transposed = x2.format() != ACL_FORMAT_FRACTAL_NZ && !x2.raw().is_contiguous();
    require(x1.size(-1) <= 65535 && (is_transposed || columns <= 65535),
            "the last dimensions of x1 and x2 must be at most 65535, but are " + text(x1.size(-1)) + " and " +
                text(columns));
    if (bias) require_shape(bias, {columns}, "bias");
    require_dtype(bias, {at::kInt}, "bias");
    require(bool(scale), "int8 x1 and x2 require dequant_scale");
    require(elements_of(scale) == 1 || elements_of(scale) == columns,
            "dequant_scale must have 1 element or N = " + text(columns) + ", but has shape " + shown(scale.sizes()));
    bool is_packed = is_packed_scale(scale);
    if (out.dtype() == at::kBFloat16)
        require(scale.dtype() == at::kBFloat16, "a bfloat16 output requires a bfloat16 dequant_scale");
    else
        require(row_scale ? scale.dtype() == at::kFloat : is_packed,
                "a float16 output requires a float32 dequant_scale with pertoken_scale, and the int64 one of "
                "npu_trans_quant_param without");
    if (!row_scale) return;
    require_dtype(row_scale, {at::kFloat}, "pertoken_scale");
    require_shape(row_scale, {elements_of(x1) / x1.size(-1)}, "pertoken_scale");
}

at::Tensor dequantized(const In& x1, const In& x2, const In& bias, const In& scale, const In& row_scale) {
    auto sums = integer_product(x1.tensor(), x2.tensor());
    if (bias) sums = sums + bias.tensor();
    auto values = sums.to(at::kFloat) * scale_of(scale).view(-1);
    return row_scale ? values * row_scale.tensor().view(x1.sizes().slice(0, x1.dim() - 1)).unsqueeze(-1) : values;
}

#define QUANTIZED(name, parameters, row_scale)                                                                        \
    void check_##name parameters { check_quantized(x1, x2, bias, x3, scale, row_scale, reduction, turn, mode, out); } \
    double count_##name parameters { return count(x1, out); }                                                         \
    Fused name parameters {                                                                                           \
        return all_reduce(group, x3, out, [=] { return dequantized(x1, x2, bias, scale, row_scale); });               \
    }

QUANTIZED(QuantMatmulAllReduce,
          (In x1, In x2, In bias, In x3, In scale, Text group, Text reduction, int64_t turn, int64_t mode, Out out),
          In(nullptr))
QUANTIZED(QuantMatmulAllReduceV2,
          (In x1, In x2, In bias, In x3, In scale, In row_scale, Text group, Text reduction, int64_t turn, int64_t mode,
           Out out),
          row_scale)

DOCUMENTED("ops-transformer: mc2/matmul_all_reduce/docs/aclnnWeightQuantMatmulAllReduce.md");
void check_weights(In x1, In x2, In bias, In scale, In offset, In x3, Text, Text reduction, int64_t turn, int64_t mode,
                   int64_t group_size, Out out) {
    check_common(x1, x2, x3, reduction, turn, mode, out);
    require_dtype(x1, {at::kHalf, at::kBFloat16}, "x1");
    if (x2.dtype() != at::kChar) throw NotEmulated("quantized weights of " + text(x2.dtype()) + " are not emulated");
    require(out.dtype() == x1.dtype(), "the output must have the dtype of x1, " + text(x1.dtype()));
    int64_t inner = x2.size(0), columns = x2.size(1);
    require(inner <= 65535 && columns <= 65535, "K and N must be at most 65535, but x2 has shape " + shown(x2.sizes()));
    if (bias) require_shape(bias, {columns}, "bias");
    require(!bias || bias.dtype() == x1.dtype(), "bias must have the dtype of x1, " + text(x1.dtype()));
    require(scale && scale.dtype() == x1.dtype(), "antiquant_scale is required, with the dtype of x1");
    require(!offset || (offset.dtype() == scale.dtype() && offset.sizes() == scale.sizes()),
            "antiquant_offset must have the shape and dtype of antiquant_scale");
    require(group_size == 0 || (group_size >= 32 && group_size % 32 == 0 && group_size < inner),
            "antiquant_group_size must be 0, or a multiple of 32 below K = " + text(inner) + ", but is " +
                text(group_size));
    int64_t rows = group_size ? (inner + group_size - 1) / group_size : 1;
    require(elements_of(scale) == rows * columns || (!group_size && elements_of(scale) == 1),
            "antiquant_scale must have a value for each of " + text(rows) + " groups and " + text(columns) +
                " columns, or one for all, but has shape " + shown(scale.sizes()));
}

double count_weights(In x1, In, In, In, In, In, Text, Text, int64_t, int64_t, int64_t, Out out) {
    return count(x1, out);
}

Fused WeightQuantMatmulAllReduce(In x1, In x2, In bias, In scale, In offset, In x3, Text group, Text, int64_t, int64_t,
                                 int64_t group_size, Out out) {
    return all_reduce(group, x3, out, [=] {
        auto factors = [=](const In& each) {
            auto values = each.tensor().to(at::kFloat);
            return group_size ? values.repeat_interleave(group_size, 0).narrow(0, 0, x2.size(0)) : values.view(-1);
        };
        auto weights = x2.tensor().to(at::kFloat);
        if (offset) weights = weights + factors(offset);
        auto product = at::matmul(widen(x1), weights * factors(scale));
        return bias ? product + widen(bias) : product;
    });
}

}  // namespace

ACLNN(MatmulAllReduce, .check = check_MatmulAllReduce, .flops = count_MatmulAllReduce, .workspace = kFusedWorkspace)
ACLNN(MatmulAllReduceV2, .check = check_MatmulAllReduceV2, .flops = count_MatmulAllReduceV2,
      .workspace = kFusedWorkspace)
ACLNN(MatmulAllReduceV3, .check = check_MatmulAllReduceV3, .flops = count_MatmulAllReduceV3,
      .workspace = kFusedWorkspace)
ACLNN(QuantMatmulAllReduce, .check = check_QuantMatmulAllReduce, .flops = count_QuantMatmulAllReduce,
      .workspace = kFusedWorkspace)
ACLNN(QuantMatmulAllReduceV2, .check = check_QuantMatmulAllReduceV2, .flops = count_QuantMatmulAllReduceV2,
      .workspace = kFusedWorkspace)
ACLNN(WeightQuantMatmulAllReduce, .check = check_weights, .flops = count_weights, .workspace = kFusedWorkspace)
