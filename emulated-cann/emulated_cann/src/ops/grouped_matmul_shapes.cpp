// Which shapes and lists of tensors a product of groups takes.
#include <algorithm>

#include "grouped_matmul.h"
#include "numeric.h"

namespace emulator {

namespace {


constexpr int64_t kMostGroups = 1024, kMostListed = 128, kInnerLimit = 65536;

// [M, K] that lies in memory as [K, M].
bool has_transposed_view(const In& x) {
    const auto& view = x.raw();
    return view.dim() == 2 && view.size(0) > 1 && view.size(1) > 1 && view.stride(0) == 1 && view.stride(1) != 1;
}

bool are_all_of(const auto& list, int64_t dims) {
    return std::all_of(list.items.begin(), list.items.end(), [&](const auto& each) { return each.dim() == dims; });
}

// "one" or "several" tensors of x, weight and y, as the documents tell the cases apart.
struct Case {
    bool x, weight, out;  // one tensor: for weight, one of 3 dimensions or, for group_type 2, of 2
    bool operator==(const Case&) const = default;
};
constexpr bool kOne = true, kSeveral = false;

Case case_of(const GroupedCall& call) { return {call.x.size() == 1, call.weight.size() == 1, call.out.size() == 1}; }

DOCUMENTED("ops-transformer: gmm/grouped_matmul/docs/aclnnGroupedMatmulV5.md");
void check_product_shapes(const GroupedCall& call) {
    for (size_t i = 0; i < std::max(call.x.size(), call.weight.size()); ++i) {
        size_t w = call.weight.size() == 1 ? 0 : i;
        const auto& x = call.x[call.x.size() == 1 ? 0 : i];
        require(x.size(-1) == call.inner(w),
                "x has K = " + number(x.size(-1)) + ", but weight has " + number(call.inner(w)) + " rows");
        if (call.out.size() > 1 && call.x.size() > 1) {
            auto shape = x.sizes().vec();
            shape.back() = call.columns(w);
            require_shape(call.out[i], shape, "y");
        }
        require(call.out.size() > 1 || call.columns(w) == call.columns(0), "the weights must have one N");
    }
    if (call.out.size() > 1) return;
    int64_t rows = 0;
    for (const auto& each : call.x.items) rows += each.size(0);
    require_shape(call.out[0], {rows, call.columns(0)}, "y");
}

DOCUMENTED("ops-transformer: gmm/grouped_matmul/docs/aclnnGroupedMatmulV5.md");
void check_bias_shape(const GroupedCall& call) {
    for (size_t i = 0; i < call.bias.size(); ++i) {
        std::vector<int64_t> shape{call.columns(i)};
        if (call.single_weight()) shape.insert(shape.begin(), call.experts());
        require_shape(call.bias[i], shape, "bias");
    }
}

DOCUMENTED("ops-transformer: gmm/grouped_matmul/docs/aclnnGroupedMatmulV5.md");
void check_list_length(const GroupedCall& call, int64_t groups, int64_t most) {
    if (!call.group_list) return;
    int64_t length = call.group_list.size(0);
    require(length <= most, "group_list has " + number(length) + " groups, at most " + number(most) + " are possible");
    require(length == groups,
            "group_list has " + number(length) + " groups, but there are weights for " + number(groups));
}

DOCUMENTED("ops-transformer: gmm/grouped_matmul/docs/aclnnGroupedMatmulV5.md");
void check_ungrouped(const GroupedCall& call, Line line) {
    require(call.split_item < 2, "group_type -1 goes with split_item 0 or 1");
    require(!call.group_list, "group_type -1 goes without group_list");
    require(call.x.size() == call.weight.size() && call.out.size() == call.weight.size(),
            "group_type -1 needs as many tensors of x and y as of weight");
    require(are_all_of(call.weight, 2), "weight must have 2 dimensions where group_type is -1");
    int64_t dims = call.x[0].dim();
    require(dims >= 2 && dims <= 6 && are_all_of(call.x, dims), "x must have 2 to 6 dimensions, the same for all");
    require(line != Line::a5 || call.precision() != Precision::plain || dims == 2,
            "x must have 2 dimensions where group_type is -1");
}

DOCUMENTED("ops-transformer: gmm/grouped_matmul/docs/aclnnGroupedMatmulV5.md");
void check_rows(const GroupedCall& call, Line line) {
    auto found = case_of(call);
    bool several_x = found == Case{kSeveral, kSeveral, kOne};
    require(found == Case{kOne, kOne, kOne} || found == Case{kOne, kSeveral, kOne} || several_x,
            "group_type 0 takes one x and one weight, one x and several weights, or several of both, and one y");
    require(call.split_item >= 2, "group_type 0 goes with split_item 2 or 3");
    require(are_all_of(call.x, 2), "x must have 2 dimensions where group_type is 0");
    require(are_all_of(call.weight, found.weight ? 3 : 2),
            "weight must be one tensor of 3 dimensions or several of 2, where group_type is 0");
    require(!several_x || call.x.size() == call.weight.size(), "x and weight must have as many tensors");
    require(several_x || call.has_list(), "group_type 0 needs group_list, unless x is several tensors");
    check_list_length(call, call.experts(), found.weight ? kMostGroups : kMostListed);
    if (line != Line::a5) return;
    require(found.weight || call.precision() == Precision::plain,
            "several tensors of weight go with an x and weight of one dtype");
    require(call.list_type != kPairs || call.precision() == Precision::int8,
            "group_list_type 2 goes with int8 x and weight");
}

// x [M, K] in memory as [K, M], weight [K, N], y [E, M, N]; or weights [K_i, N] and y [M, N] each.
DOCUMENTED("ops-transformer: gmm/grouped_matmul/docs/aclnnGroupedMatmulV5.md");
void check_inner(const GroupedCall& call, Line line) {
    auto found = case_of(call);
    require(call.precision() == Precision::plain, "group_type 2 goes with x and weight of one floating dtype");
    require(found == Case{kOne, kOne, kOne} || found == Case{kOne, kSeveral, kSeveral},
            "group_type 2 takes one x with one weight and one y, or with several of both");
    require(are_all_of(call.x, 2) && are_all_of(call.weight, 2),
            "x and weight must have 2 dimensions where group_type is 2");
    const auto& x = call.x[0];
    require(has_transposed_view(x) || x.size(0) == 1 || x.size(1) == 1, "x must be transposed where group_type is 2");
    require(!call.weight[0].is_transposed(), "weight must not be transposed where group_type is 2");
    require(!call.bias.size(), "bias does not go with group_type 2");
    int64_t most = x.size(1), rows = 0;
    for (size_t i = 0; i < call.weight.size(); ++i) {
        rows += call.weight[i].size(0);
        if (!found.out) require_shape(call.out[i], {x.size(0), call.weight[i].size(1)}, "y");
    }
    if (found.out) {
        require(call.split_item >= 2, "one y goes with split_item 2 or 3");
        require(bool(call.group_list), "group_type 2 with one y needs group_list");
        require(rows == most, "x has K = " + number(most) + ", but weight has " + number(rows) + " rows");
        require_shape(call.out[0], {call.group_list.size(0), x.size(0), call.weight[0].size(1)}, "y");
        return check_list_length(call, call.group_list.size(0), kMostGroups);
    }
    require(call.split_item < 2 && call.out.size() == call.weight.size(),
            "several y go with split_item 0 or 1, and as many weights");
    require(line == Line::a5 || !call.group_list, "group_type 2 with several y goes without group_list");
    if (call.group_list) throw NotEmulated("group_list is not emulated for group_type 2 with several y");
    require(rows <= most, "the weights have " + number(rows) + " rows, but x has K = " + number(most));
}

DOCUMENTED("ops-transformer: gmm/grouped_matmul/docs/aclnnGroupedMatmulV5.md");
void check_layout(const GroupedCall& call, Line line) {
    for (const auto& x : call.x.items) {
        require(call.group_type == 2 || !has_transposed_view(x), "x must not be transposed unless group_type is 2");
        int64_t last = has_transposed_view(x) ? x.size(0) : x.size(-1);
        require(line != Line::a2_a3 || last < kInnerLimit,
                "the last dimension of x must be below 65536, but is " + number(last));
    }
    for (const auto& weight : call.weight.items) {
        int64_t last = weight.is_transposed() ? weight.size(-2) : weight.size(-1);
        require(line != Line::a2_a3 || call.weight_nz || last < kInnerLimit,
                "the last dimension of weight must be below 65536, but is " + number(last));
        require(call.weight_nz || line != Line::a5 || !weight.is_nz(), "weight must be in ND");
        if (!call.weight_nz) continue;
        DOCUMENTED("ops-transformer: gmm/grouped_matmul/docs/aclnnGroupedMatmulWeightNz.md");
        if (!weight.is_nz()) throw NotEmulated("a weight in ND that is to be read as FRACTAL_NZ is not emulated");
        if (line != Line::a5) continue;
        require(weight.size(-1) != 1 && weight.size(-2) != 1, "a matrix with a side of 1 cannot be in FRACTAL_NZ");
        int64_t row = 32 / c10::elementSize(weight.dtype());
        require(call.precision() != Precision::plain || (weight.size(-1) % row == 0 && weight.size(-2) % row == 0),
                "K and N of a weight in FRACTAL_NZ must be multiples of 32 bytes");
    }
}

DOCUMENTED("ops-transformer: gmm/grouped_matmul/docs/aclnnGroupedMatmulWeightNz.md");
void check_nz(const GroupedCall& call, Line line) {
    require(call.group_type != 2, "a weight in FRACTAL_NZ goes with group_type -1 or 0");
    require(line != Line::a5 || call.group_type == 0 || call.precision() == Precision::plain,
            "group_type -1 goes with x and weight of one dtype");
    require(line != Line::a2_a3 || !call.group_list || call.list_type == kEnds || call.group_list.size(0) != 1,
            "group_list of sizes or pairs must not have 1 group where weight is in FRACTAL_NZ");
}

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_grouped_matmul.md");
void check_inference(const GroupedCall& call) {
    require(call.x[0].dtype() == at::kHalf && call.weight[0].dtype() == at::kHalf,
            "x and weight must be float16 on Atlas inference products");
    require(call.group_type == 0 && case_of(call) == Case{kOne, kOne, kOne},
            "x, weight and y must be one tensor each, and group_type 0, on Atlas inference products");
    require(call.list_type != kPairs, "group_list_type must be 0 or 1 on Atlas inference products");
    require(call.act_type == 0, "act_type must be 0 on Atlas inference products");
    require(call.columns(0) % 16 == 0,
            "N must be a multiple of 16 on Atlas inference products, but is " + number(call.columns(0)));
}

}  // namespace

void check_grouped(const GroupedCall& call) {
    auto line = product_line("GroupedMatmul");
    check_types(call, line);
    if (line == Line::inference) check_inference(call);
    if (call.weight_nz) check_nz(call, line);
    check_layout(call, line);
    if (call.group_type == 2) return check_inner(call, line);
    call.group_type == 0 ? check_rows(call, line) : check_ungrouped(call, line);
    check_product_shapes(call);
    check_bias_shape(call);
}

DOCUMENTED("ops-transformer: gmm/grouped_matmul/docs/aclnnGroupedMatmul.md");
void check_grouped_v1(const GroupedCall& call) {
    auto line = product_line("GroupedMatmul");
    if (call.x.size() && call.weight.size() && call.precision() == Precision::int8)
        throw NotEmulated("int8 x is emulated where group_list is a tensor only");
    check_types(call, line);
    {
        DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_grouped_matmul.md");
        require(line != Line::inference, "group_list must be a tensor on Atlas inference products");
    }
    require(are_all_of(call.weight, 2), "weight must have 2 dimensions where group_list is not a tensor");
    check_layout(call, line);
    auto found = case_of(call);
    bool apart = call.x.size() == call.weight.size();
    require(apart || call.x.size() == 1, "x must be one tensor, or as many as weight");
    require((call.split_item < 2) == (call.out.size() == call.weight.size()) || call.weight.size() == 1,
            "y must be as many tensors as weight with split_item 0 or 1, and one with 2 or 3");
    require(found.out || call.out.size() == call.weight.size(), "y must be one tensor, or as many as weight");
    require(apart || call.ends, "one x with several weights needs group_list");
    require(are_all_of(call.x, 2) || (apart && !found.out && !call.ends),
            "x must have 2 dimensions, unless x and y are several tensors and there is no group_list");
    require(line != Line::a5 || call.precision() == Precision::plain || (apart && !found.out),
            "a quantized weight goes with several tensors of x and y");
    if (call.ends) {
        const auto& ends = *call.ends;
        require(ends.size() > 1 && ends.size() <= kMostListed && ends.size() == call.weight.size(),
                "group_list must have from 2 to 128 elements, as many as weight has tensors");
        int64_t before = 0;
        for (size_t i = 0; i < ends.size(); ++i) {
            require(ends[i] >= before, "group_list must not decrease");
            int64_t rows = ends[i] - before;
            require(call.x.size() == 1 || call.x[i].size(0) == rows,
                    "group_list must give each tensor of x its rows");
            require(found.out || call.out[i].size(0) == rows, "group_list must give each tensor of y its rows");
            before = ends[i];
        }
        require(call.x.size() > 1 || before == call.x[0].size(0),
                "group_list must end with the rows of x, " + number(call.x[0].size(0)) + ", not " + number(before));
    }
    check_product_shapes(call);
    check_bias_shape(call);
}

}  // namespace emulator
