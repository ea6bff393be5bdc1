// Matrix products with an all-gather before them, or a reduce-scatter after them, in the same launch.
#include "fused_collective.h"
#include "quantize.h"

namespace {

using namespace emulator;


constexpr int64_t kLeastInner = 256, kInnerEnd = 65535;

// What both operations have in V1 and V2. Scales are absent in V1.
struct Product2d {
    In x1, x2, bias, x1_scale, x2_scale;
    Text group;
    int64_t turn, mode;
    Out out;
    bool is_quantized() const { return x1.dtype() == at::kChar; }
    int64_t rows() const { return x1.size(0); }
    int64_t inner() const { return x1.size(1); }
    int64_t columns() const { return x2.size(1); }
    size_t x1_bytes() const { return elements_of(x1) * c10::elementSize(x1.dtype()); }
};

DOCUMENTED(
    "ops-transformer: mc2/all_gather_matmul/docs/aclnnAllGatherMatmul.md"
    "; ops-transformer: mc2/matmul_reduce_scatter/docs/aclnnMatmulReduceScatter.md");
void check_shapes(const Product2d& p) {
    require(p.x1.dim() == 2 && p.x2.dim() == 2,
            "x1 and x2 must have 2 dimensions, but have shapes " + shown(p.x1.sizes()) + " and " + shown(p.x2.sizes()));
    require(p.inner() == p.x2.size(0), "x1 must have as many columns as x2 has rows, but they have shapes " +
                                           shown(p.x1.sizes()) + " and " + shown(p.x2.sizes()));
    require(p.inner() >= kLeastInner && p.inner() < kInnerEnd,
            "the number of columns of x1 must be at least 256 and less than 65535, but is " + text(p.inner()));
    require(is_empty(p.x1) || p.x1.raw().stride(1) == 1 || !p.x1.raw().t().is_contiguous(),
            "x1 must not be transposed; only x2 may be");
    require(p.mode == 1, "streamMode must be 1, but is " + text(p.mode));
    require_tiling(p.turn == 0, "comm_turn must be 0, but is " + text(p.turn));
    if (p.bias) require_shape(p.bias, {p.columns()}, "bias");
}

void check_v1(const Product2d& p) {
    require_product("this operation", {Product::a2, Product::a3});
    check_shapes(p);
    require_dtype(p.x1, {at::kHalf, at::kBFloat16}, "x1");
    for (const In* each : {&p.x2, &p.bias, static_cast<const In*>(&p.out)})
        require(!*each || each->dtype() == p.x1.dtype(),
                "x2, bias and the output must have the dtype of x1, " + text(p.x1.dtype()));
    require(p.x2.format() != ACL_FORMAT_FRACTAL_NZ, "x2 in FRACTAL_NZ requires comm_mode aiv");
}

DOCUMENTED(
    "ops-transformer: mc2/all_gather_matmul_v2/docs/aclnnAllGatherMatmulV2.md"
    "; ops-transformer: mc2/matmul_reduce_scatter_v2/docs/aclnnMatmulReduceScatterV2.md");
void check_v2(const Product2d& p, const In& quant_scale, int64_t block_size, int64_t group_size, const Text& engine,
              const Out& amax) {
    require_product("this operation", {Product::a2, Product::a3, Product::ascend950});
    check_shapes(p);
    require(!is_given(quant_scale) && !is_given(amax), "quant_scale and amax_output must be omitted");
    bool is_950 = product() == Product::ascend950;
    bool has_engine = is_950 ? engine.value == "ai_cpu" || engine.value == "ccu" : engine.value == "aiv";
    require_tiling(has_engine, "comm_mode must be aiv, on Ascend 950 ai_cpu or ccu, but is " + engine.value);
    require(block_size == 0, "block_size must be 0, but is " + text(block_size));
    if (is_950 && c10::isFloat8Type(p.x1.dtype())) throw NotEmulated("float8 products are not emulated");
    require(p.is_quantized() ? !is_950 : p.x1.dtype() == at::kHalf || p.x1.dtype() == at::kBFloat16,
            "x1 must be float16 or bfloat16, on Atlas A2 and A3 also int8, but is " + text(p.x1.dtype()));
    require(p.x2.dtype() == p.x1.dtype(), "x2 must have the dtype of x1, " + text(p.x1.dtype()));
    require(is_950 || (!is_empty(p.x1) && !is_empty(p.x2)), "x1 and x2 must not be empty");
    require(!is_950 || p.x2.format() != ACL_FORMAT_FRACTAL_NZ, "x2 must not be in FRACTAL_NZ on Ascend 950");
    require(group_size == 0, "group_sizes must be omitted");
    if (!p.is_quantized()) {
        require(!is_given(p.x1_scale) && !is_given(p.x2_scale), "scales require int8 x1 and x2");
        require(p.out.dtype() == p.x1.dtype(), "the output must have the dtype of x1, " + text(p.x1.dtype()));
        return;
    }
    require_dtype(p.out, {at::kHalf, at::kBFloat16}, "the output");
    require(is_given(p.x2_scale), "int8 x1 and x2 require x2_scale");
    require_shape(p.x2_scale, {1, p.columns()}, "x2_scale");
    require(is_packed_scale(p.x2_scale) ? p.out.dtype() == at::kHalf : p.x2_scale.dtype() == at::kFloat,
            "x2_scale must be float32, or with a float16 output the int64 one of npu_trans_quant_param");
    if (!is_given(p.x1_scale)) return;
    require_dtype(p.x1_scale, {at::kFloat}, "x1_scale");
    require_shape(p.x1_scale, {p.rows(), 1}, "x1_scale");
}

CommunicatorPointer find_ranks(const Product2d& p, bool is_v2) {
    auto communicator = find_group(p.group);
    if (product() == Product::ascend950)
        require_ranks(*communicator, {2, 4, 8, 16, 32, 64});
    else if (product() == Product::a3 && !is_v2)
        require_ranks(*communicator, {2, 4, 8, 16, 32});
    else
        require_ranks(*communicator, {2, 4, 8});
    return communicator;
}

// Returns the product in float32. `x1_scale` is undefined for none.
at::Tensor multiply(const Product2d& p, const at::Tensor& x1, const at::Tensor& x1_scale) {
    if (!p.is_quantized()) {
        auto product = at::matmul(widen(x1), widen(p.x2));
        return p.bias ? product + widen(p.bias) : product;
    }
    auto product = integer_product(x1, p.x2.tensor()).to(at::kFloat) * scale_of(p.x2_scale.tensor());
    if (x1_scale.defined()) product = product * x1_scale;
    return p.bias ? product + widen(p.bias) : product;
}

// The released kernels of V1 promise nothing for another bias.
DOCUMENTED(
    "ops-transformer: mc2/all_gather_matmul/docs/aclnnAllGatherMatmul.md"
    "; ops-transformer: mc2/matmul_reduce_scatter/docs/aclnnMatmulReduceScatter.md");
void require_zero_bias(const Product2d& p) {
    if (p.bias && p.bias.tensor().count_nonzero().item<int64_t>())
        throw std::runtime_error("bias must be zero in this version; add it to the output instead");
}

Fused gather(Product2d p, const Out& gathered, bool is_v2) {
    if (is_empty(p.x1)) return {};
    auto communicator = find_ranks(p, is_v2);
    int64_t ranks = communicator->ranks;
    require_shape(p.out, {p.rows() * ranks, p.columns()}, "the output");
    bool has_gathered = is_given(gathered);
    if (has_gathered) require_shape(gathered, {p.rows() * ranks, p.inner()}, "gather_out");
    require(!has_gathered || gathered.dtype() == p.x1.dtype(), "gather_out must have the dtype of x1");
    require(has_gathered || !is_v2 || product() == Product::ascend950, "comm_mode aiv requires gather_output");
    Fused made{communicator, collective_of(p.x1.dtype(), elements_of(p.x1), false)};
    bool has_scale = is_given(p.x1_scale);
    set_bytes(made.collective, p.x1_bytes() + (has_scale ? p.rows() * sizeof(float) : 0));
    require_agreement(made.collective,
                      {{"the number of columns of x1", p.inner()}, {"the presence of x1_scale", has_scale}});
    made.collective.put = [=](char* slot) {
        if (!is_v2) require_zero_bias(p);
        in_slot(slot, p.x1.sizes(), p.x1.dtype()).copy_(p.x1.tensor());
        if (has_scale) in_slot(slot + p.x1_bytes(), {p.rows(), 1}, at::kFloat).copy_(p.x1_scale.tensor());
    };
    made.collective.take = [=](const Turn& turn) {
        std::vector<at::Tensor> parts, scales;
        for (uint32_t each = 0; each < turn.ranks(); ++each) {
            parts.push_back(in_slot(turn.data(each), p.x1.sizes(), p.x1.dtype()));
            if (has_scale) scales.push_back(in_slot(turn.data(each) + p.x1_bytes(), {p.rows(), 1}, at::kFloat));
        }
        auto whole = at::cat(parts);
        if (has_gathered) gathered.set(whole);
        if (!is_empty(p.out)) p.out.set(multiply(p, whole, has_scale ? at::cat(scales) : at::Tensor()));
    };
    return made;
}

Fused scatter(Product2d p, bool is_v2) {
    if (is_empty(p.x1) || is_empty(p.x2)) return {};
    auto communicator = find_ranks(p, is_v2);
    int64_t part = p.rows() / communicator->ranks;
    require(p.rows() % communicator->ranks == 0, "x1 must have a multiple of as many rows as the group has ranks, " +
                                                     text(communicator->ranks) + ", but has " + text(p.rows()));
    require_shape(p.out, {part, p.columns()}, "the output");
    Fused made{communicator, collective_of(p.out.dtype(), elements_of(p.out), true)};
    std::vector<int64_t> shape{p.rows(), p.columns()};
    set_bytes(made.collective, p.rows() * p.columns() * c10::elementSize(p.out.dtype()));
    require_agreement(made.collective, {{"the number of columns of x2", p.columns()}});
    made.collective.put = [=](char* slot) {
        if (!is_v2) require_zero_bias(p);
        auto scale = is_given(p.x1_scale) ? p.x1_scale.tensor() : at::Tensor();
        in_slot(slot, shape, p.out.dtype()).copy_(multiply(p, p.x1.tensor(), scale));
    };
    made.collective.take = [=](const Turn& turn) {
        p.out.set(sum_of_ranks(turn, turn.rank() * elements_of(p.out), p.out.sizes(), p.out.dtype()));
    };
    return made;
}

double count(const In& x1, const In& x2, int64_t rows) { return 2.0 * rows * x1.size(1) * x2.size(1); }

DOCUMENTED("ops-transformer: mc2/all_gather_matmul/docs/aclnnAllGatherMatmul.md");
void check_index(int64_t index) { require_tiling(index == 0, "gather_index must be 0, but is " + text(index)); }

DOCUMENTED("ops-transformer: mc2/matmul_reduce_scatter/docs/aclnnMatmulReduceScatter.md");
void check_reduction(const Text& reduction) {
    require_tiling(reduction.value == "sum", "reduce_op must be sum, but is " + reduction.value);
}

// Each interface: its parameters, its further checks, and how it is bound.
#define PRODUCT(name, parameters, rows, checks, call)              \
    void check_##name parameters { checks; }                       \
    double count_##name parameters { return count(x1, x2, rows); } \
    Fused name parameters { return call; }

#define P1 \
    Product2d { x1, x2, bias, nullptr, nullptr, group, turn, mode, out }
#define P2 \
    Product2d { x1, x2, bias, x1_scale, x2_scale, group, turn, mode, out }

PRODUCT(AllGatherMatmul,
        (In x1, In x2, In bias, Text group, int64_t index, int64_t turn, int64_t mode, Out out, Out gathered),
        out.size(0), (check_v1(P1), check_index(index)), gather(P1, gathered, false))
PRODUCT(AllGatherMatmulV2,
        (In x1, In x2, In bias, In x1_scale, In x2_scale, In quant_scale, int64_t block_size, Text group, int64_t index,
         int64_t turn, int64_t mode, int64_t group_size, Text engine, Out out, Out gathered, Out amax),
        out.size(0), (check_v2(P2, quant_scale, block_size, group_size, engine, amax), check_index(index)),
        gather(P2, gathered, true))
PRODUCT(MatmulReduceScatter, (In x1, In x2, In bias, Text group, Text reduction, int64_t turn, int64_t mode, Out out),
        x1.size(0), (check_v1(P1), check_reduction(reduction)), scatter(P1, false))
PRODUCT(MatmulReduceScatterV2,
        (In x1, In x2, In bias, In x1_scale, In x2_scale, In quant_scale, int64_t block_size, Text group,
         Text reduction, int64_t turn, int64_t mode, int64_t group_size, Text engine, Out out, Out amax),
        x1.size(0), (check_v2(P2, quant_scale, block_size, group_size, engine, amax), check_reduction(reduction)),
        scatter(P2, true))

}  // namespace

#define EXPORT(name) ACLNN(name, .check = check_##name, .flops = count_##name, .workspace = kFusedWorkspace)
EXPORT(AllGatherMatmul)
EXPORT(AllGatherMatmulV2)
EXPORT(MatmulReduceScatter)
EXPORT(MatmulReduceScatterV2)
