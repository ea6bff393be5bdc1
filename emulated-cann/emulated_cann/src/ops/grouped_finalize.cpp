// Products of groups of rows with a matrix each, added to the rows of their tokens.
#include "grouped.h"
#include "numeric.h"
#include "quantize.h"

namespace {

using namespace emulator;

// One expert's rows follow those of the one before. Tokens of the output without a row, and rows outside those of
// shared_input, are zero.
struct Call {
    In x;
    const Weight& weight;
    In scale, token_scale, list, shared, logit, rows;
    double shared_factor;
    int64_t shared_start, list_type;
    Out y;
};

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_grouped_matmul_finalize_routing.md");
void check(const Call& call, std::initializer_list<const In*> of_int4) {
    require(product_line("GroupedMatmulFinalizeRouting") != Line::inference, "it is not for " + soc_name());
    if (call.x.dtype() != at::kChar || call.weight.dtype() != at::kChar)
        throw NotEmulated("x and weights other than int8 are not emulated");
    for (const In* each : of_int4) require(!*each, "bias, offset and antiquantization require weights of int4");
    require(call.weight.is_nz() && call.weight.dim() == 3, "w of int8 must be in FRACTAL_NZ, with 3 dimensions");
    int64_t tokens = call.x.size(0), inner = call.x.size(1), experts = call.weight.size(0), n = call.weight.size(-1);
    require(call.weight.size(-2) == inner, "the inner dimensions of x and w must be the same, but are " +
                                               std::to_string(inner) + " and " +
                                               std::to_string(call.weight.size(-2)));
    require(inner % 16 == 0 && n % 32 == 0 && n >= 256,
            "k must be a multiple of 16, and n one of 32 from 256 on, but they are " + std::to_string(inner) + " and " +
                std::to_string(n));
    require(experts <= 256, "there may be at most 256 experts, not " + std::to_string(experts));
    require(call.scale && call.token_scale && call.logit && call.rows && call.list,
            "int8 requires group_list, scale, pertoken_scale, logit and row_index");
    require_dtype(call.list, {at::kLong}, "group_list");
    require_shape(call.list, {experts}, "group_list");
    require(call.list_type == 0 || call.list_type == 1, "group_list_type must be 0 or 1");
    require_dtype(call.scale, {at::kFloat}, "scale");
    require_shape(call.scale, {experts, n}, "scale");
    for (const In* each : {&call.token_scale, &call.logit}) {
        require_dtype(*each, {at::kFloat}, "pertoken_scale and logit");
        require_shape(*each, {tokens}, "pertoken_scale and logit");
    }
    require_dtype(call.rows, {at::kInt, at::kLong}, "row_index");
    require_shape(call.rows, {tokens}, "row_index");
    require_dtype(call.shared, {at::kBFloat16}, "shared_input");
    require_dtype(call.y, {at::kFloat}, "y");
    require(!call.shared || (call.shared.dim() == 2 && call.shared.size(1) == n && call.shared_start >= 0 &&
                             call.shared_start + call.shared.size(0) <= call.y.size(0)),
            "shared_input must have shape [rows, n] and, from shared_input_offset on, fit into the output");
}

void run(const Call& call) {
    auto sums = at::zeros(call.y.sizes(), at::kFloat), x = call.x.tensor();
    if (call.shared)
        sums.narrow(0, call.shared_start, call.shared.size(0))
            .add_(call.shared.tensor().to(at::kFloat) * call.shared_factor);
    auto factors = call.token_scale.tensor() * call.logit.tensor(), rows = call.rows.tensor().to(at::kLong);
    for (const auto& group : groups_of(call.list.tensor(), call.list_type, x.size(0), call.weight.size(0))) {
        if (group.rows == 0) continue;
        auto own = [&](const at::Tensor& of) { return of.narrow(0, group.begin, group.rows); };
        auto found = integer_product(own(x), call.weight.matrix(group.expert)).to(at::kFloat) *
                     call.scale.tensor()[group.expert] * own(factors).unsqueeze(1);
        UNDEFINED("a kernel would write outside its output");
        if ((own(rows) < 0).logical_or_(own(rows) >= sums.size(0)).any().item<bool>())
            throw std::runtime_error("row_index must be between 0 and " + std::to_string(sums.size(0) - 1));
        sums.index_add_(0, own(rows), found);
    }
    call.y.set(sums);
}

#define PARAMETERS(Weights)                                                                                          \
    In x, Weights weight, In scale, In bias, In offset, In weight_scale, In weight_offset, In token_scale, In list, \
        In shared, In logit, In rows, int64_t, float shared_factor, int64_t shared_start, bool, bool,                \
        int64_t list_type, Ints, Out y
#define CALL                                                                                                        \
    Call {                                                                                                          \
        x, weight, scale, token_scale, list, shared, logit, rows, shared_factor, shared_start, list_type, y         \
    }

void check_nd(PARAMETERS(Weight)) { check(CALL, {&bias, &offset, &weight_scale, &weight_offset}); }
void GroupedMatmulFinalizeRoutingV3(PARAMETERS(Weight)) { run(CALL); }
void check_nz(PARAMETERS(NzWeight)) { check(CALL, {&bias, &offset, &weight_scale, &weight_offset}); }
void GroupedMatmulFinalizeRoutingWeightNzV2(PARAMETERS(NzWeight)) { run(CALL); }

}  // namespace

ACLNN(GroupedMatmulFinalizeRoutingV3, .check = check_nd)
ACLNN(GroupedMatmulFinalizeRoutingWeightNzV2, .check = check_nz)
