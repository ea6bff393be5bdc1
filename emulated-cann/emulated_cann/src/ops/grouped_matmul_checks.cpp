// Which products of groups each product line takes.
#include "grouped_matmul.h"
#include "numeric.h"
#include "quantize.h"

namespace emulator {

namespace {


constexpr int64_t kMostInGroup = 1024, kMostTensors = 128;

bool is_half(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

// The type that all tensors of a list have; Undefined for none.
at::ScalarType type_of(const Ins& list) { return list.size() ? list[0].dtype() : at::ScalarType::Undefined; }

bool is_one_of(at::ScalarType dtype, std::initializer_list<at::ScalarType> allowed) {
    return std::find(allowed.begin(), allowed.end(), dtype) != allowed.end();
}

constexpr auto kNone = at::ScalarType::Undefined;

DOCUMENTED("ops-transformer: gmm/grouped_matmul/docs/aclnnGroupedMatmulV5.md");
void check_lists(const GroupedCall& call, Line line) {
    require(call.x.size() && call.weight.size() && call.out.size(), "x, weight and y must have tensors");
    bool many = line == Line::a5 && call.precision() == Precision::plain;
    for (size_t size : {call.x.size(), call.weight.size(), call.out.size()})
        require(int64_t(size) <= (many ? kMostInGroup : kMostTensors),
                "a list has " + number(size) + " tensors, at most " + number(many ? kMostInGroup : kMostTensors) +
                    " are possible");
    auto check = [](const auto& list, const std::string& name) {
        for (const auto& each : list.items) {
            require(bool(each), name + " has an element that is null");
            require(each.dtype() == list[0].dtype(), "the tensors of " + name + " must have one dtype");
        }
    };
    check(call.x, "x"), check(call.weight, "weight"), check(call.out, "y");
    for (const auto* list : {&call.bias, &call.scale, &call.antiquant_scale, &call.antiquant_offset}) {
        check(*list, "bias, scale or antiquant");
        require(!list->size() || list->size() == call.weight.size(),
                "bias, scale, antiquant_scale and antiquant_offset must have as many tensors as weight");
    }
    bool transposed = call.weight[0].is_transposed();
    for (const auto& each : call.weight.items)
        require(each.is_transposed() == transposed, "either all tensors of weight are transposed, or none");
}

DOCUMENTED("ops-transformer: gmm/grouped_matmul/docs/aclnnGroupedMatmulV5.md");
void check_settings(const GroupedCall& call) {
    require(call.split_item >= 0 && call.split_item <= 3,
            "split_item must be 0 or 1 (y as several tensors), or 2 or 3 (as one), but is " + number(call.split_item));
    require(call.group_type == -1 || call.group_type == 0 || call.group_type == 2,
            "group_type must be -1 (none), 0 (rows of x) or 2 (the inner dimension), but is " +
                number(call.group_type));
    require(call.list_type >= 0 && call.list_type <= 2,
            "group_list_type must be 0 (where groups end), 1 (their sizes) or 2 (pairs), but is " +
                number(call.list_type));
    require(call.act_type >= 0 && call.act_type <= 5 && call.act_type != 3,
            "act_type must be 0, 1, 2, 4 or 5, but is " + number(call.act_type));
    if (!call.group_list) return;
    require(call.group_list.dtype() == at::kLong,
            "group_list must be int64, not " + text(call.group_list.dtype()));
    if (call.list_type == kPairs)
        require(call.group_list.dim() == 2 && call.group_list.size(1) == 2,
                "group_list must be [E, 2] where group_list_type is 2");
    else
        require(call.group_list.dim() == 1, "group_list must have 1 dimension");
}

DOCUMENTED("ops-transformer: gmm/grouped_matmul/docs/aclnnGroupedMatmulV5.md");
void check_plain(const GroupedCall& call, Line line) {
    auto dtype = call.x[0].dtype(), bias = type_of(call.bias);
    require(is_half(dtype) || dtype == at::kFloat,
            "x must be float16, bfloat16, float32 or int8, not " + text(dtype));
    require(call.out[0].dtype() == dtype, "y must have x's dtype where nothing is quantized");
    require(!call.scale.size() && !call.offset.size() && !call.token_scale.size() && !call.antiquant_scale.size() &&
                !call.antiquant_offset.size(),
            "scales and offsets go with quantized x or weight");
    if (line == Line::a5)
        require(is_one_of(bias, {kNone, dtype, at::kFloat}), "bias must be of x's dtype or float32");
    else
        require(bias == kNone || bias == (dtype == at::kBFloat16 ? at::kFloat : dtype),
                "bias must be float32 for bfloat16 x, and else of x's dtype, not " + text(bias));
    require(call.act_type == 0, "act_type goes with int8 x and weight");
    require(dtype != at::kFloat || (!call.weight[0].is_nz() && !call.weight_nz),
            "a float32 weight cannot be in FRACTAL_NZ");
    DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_grouped_matmul.md (table 2)");
    require(line != Line::a2_a3 || dtype != at::kFloat ||
                (call.x.size() == 1 && call.weight.size() == 1 && call.out.size() == 1),
            "float32 is for x, weight and y of one tensor each");
}

DOCUMENTED("ops-transformer: gmm/grouped_matmul/docs/aclnnGroupedMatmulV5.md");
void check_int8(const GroupedCall& call, Line line) {
    auto out = call.out[0].dtype(), scale = type_of(call.scale), bias = type_of(call.bias);
    if (call.x[0].dtype() == at::kInt || call.is_int4())
        throw NotEmulated("int4 x is not emulated");
    require(call.weight[0].dtype() == at::kChar, "an int8 x needs an int8 weight, not " + text(call.weight[0].dtype()));
    require(call.group_type == 0 && call.x.size() == 1 && call.single_weight() && call.out.size() == 1,
            "int8 x goes with group_type 0, and x, a weight of 3 dimensions and y of one tensor each");
    require(!call.offset.size() && !call.antiquant_scale.size() && !call.antiquant_offset.size(),
            "offset, antiquant_scale and antiquant_offset do not go with int8 x and weight");
    bool packed = is_one_of(scale, {at::kLong, at::kUInt64}), by_token = call.token_scale.size();
    bool a5 = line == Line::a5;
    require(is_one_of(out, {at::kBFloat16, at::kHalf, at::kInt, at::kChar}),
            "y of int8 x must be bfloat16, float16, int32 or int8, not " + text(out));
    require(!by_token || (is_half(out) && !packed),
            "per_token_scale goes with a y of bfloat16 or float16 and a scale of bfloat16 or float32");
    if (out == at::kInt)
        require(scale == kNone || (a5 && packed), "an int32 y goes without scale");
    else if (out == at::kChar)
        require(packed, "an int8 y needs an int64 scale, of TransQuantParam, not " + text(scale));
    else if (out == at::kHalf)
        require(scale == at::kFloat || (a5 && packed), "a float16 y needs a float32 scale, not " + text(scale));
    else
        require(scale == at::kBFloat16 || (a5 && (packed || scale == at::kFloat)),
                "a bfloat16 y needs a bfloat16 scale, not " + text(scale));
    bool wide_bias = a5 && is_half(out) && !packed && is_one_of(bias, {at::kFloat, out});
    require(bias == kNone || bias == at::kInt || wide_bias, "bias must be int32 here, not " + text(bias));
    require(call.act_type == 0 || (is_half(out) && !packed),
            "act_type goes with a y of bfloat16 or float16 and a scale of bfloat16 or float32");
    require(out != at::kChar || (!call.weight[0].is_nz() && !call.weight_nz),
            "an int8 y does not go with a weight in FRACTAL_NZ");
    int64_t experts = call.experts(), columns = call.columns(0);
    if (scale != kNone) {
        const auto& given = call.scale[0];
        bool by_column = given.sizes() == at::IntArrayRef{experts, columns};
        bool by_tensor = given.sizes() == at::IntArrayRef{experts, 1} || given.sizes() == at::IntArrayRef{experts};
        require(by_column || (a5 && by_tensor && out != at::kChar),
                "scale must be [E, N] = [" + number(experts) + ", " + number(columns) + "], but is " +
                    shown(given.sizes()));
        require(call.act_type == 0 || by_column, "act_type goes with a scale for each column");
    }
    if (!by_token) return;
    require(call.token_scale.size() == 1 && call.token_scale[0].dtype() == at::kFloat &&
                call.token_scale[0].sizes() == at::IntArrayRef{call.x[0].size(0)},
            "per_token_scale must be float32 and [M], one for each row of x");
}

constexpr int64_t kMixedGroup = 256, kMixedInner = 18432;

// One scale for each column is documented by vllm-ascend (quantization/methods/w4a8.py), groups of 256 by CANN.
DOCUMENTED("ops-transformer: gmm/grouped_matmul/docs/aclnnGroupedMatmulV5.md (A8W4)");
void check_mixed(const GroupedCall& call, Line line) {
    if (line != Line::a2_a3) throw NotEmulated("int4 weights beside int8 x are emulated on Atlas A2 and A3 only");
    if (call.weight_nz || call.weight[0].is_nz())
        throw NotEmulated("int4 weights in FRACTAL_NZ beside int8 x are not emulated");
    if (call.offset.size() || call.weight.size() > 1)
        throw NotEmulated("offset, and several tensors of int4 weights, are not emulated beside int8 x");
    require(call.group_type == 0 && call.x.size() == 1 && call.single_weight() && call.out.size() == 1,
            "int8 x goes with group_type 0, and x, a weight of 3 dimensions and y of one tensor each");
    require(!call.antiquant_scale.size() && !call.antiquant_offset.size(),
            "antiquant_scale and antiquant_offset do not go with int8 x");
    require(is_half(call.out[0].dtype()), "y of int8 x and int4 weight must be float16 or bfloat16, not " +
                                              text(call.out[0].dtype()));
    require(call.act_type == 0, "act_type goes with int8 x and weight");
    require(call.list_type == kCounts, "int8 x and int4 weight need group_list_type 1");
    require(!call.weight[0].is_transposed(), "an int4 weight beside int8 x must be [E, K, N / 8] and not transposed");
    int64_t experts = call.experts(), columns = call.columns(0), inner = call.inner(0);
    require(inner <= kMixedInner, "K must be at most 18432 with int8 x and int4 weight, but is " + number(inner));
    require(call.scale.size() && is_one_of(type_of(call.scale), {at::kLong, at::kUInt64}),
            "int8 x and int4 weight need an int64 scale");
    auto scale = call.scale[0].sizes();
    require(scale.size() == 3 && scale[0] == experts && scale[2] == columns &&
                (scale[1] == 1 || scale[1] * kMixedGroup == inner),
            "scale must be [E, K / 256, N] or [E, 1, N], with E = " + number(experts) + ", K = " + number(inner) +
                " and N = " + number(columns) + ", but is " + shown(scale));
    require(call.bias.size() && type_of(call.bias) == at::kFloat,
            "int8 x and int4 weight need a float32 bias: 8 times the sums of the scaled weight");
    require(call.token_scale.size() == 1 && call.token_scale[0].dtype() == at::kFloat &&
                call.token_scale[0].sizes() == at::IntArrayRef{call.x[0].size(0)},
            "per_token_scale must be float32 and [M], one for each row of x");
}

DOCUMENTED("ops-transformer: gmm/grouped_matmul/docs/aclnnGroupedMatmulV5.md");
void check_weight_only(const GroupedCall& call, Line line) {
    auto dtype = call.x[0].dtype(), bias = type_of(call.bias);
    bool int4 = call.is_int4(), a5 = line == Line::a5;
    require(is_half(dtype), "x must be float16 or bfloat16 with an int8 or int4 weight, not " + text(dtype));
    if (at::isFloat8Type(call.weight[0].dtype())) throw NotEmulated("float8 weights are not emulated");
    require(int4 || call.weight[0].dtype() == at::kChar,
            "weight must be of x's dtype, int8, or int4 in int32, not " + text(call.weight[0].dtype()));
    require(call.out[0].dtype() == dtype, "y must have x's dtype where the weight alone is quantized");
    require(call.group_type != 2, "a quantized weight goes with group_type -1 or 0");
    require(!call.scale.size() && !call.offset.size() && !call.token_scale.size(),
            "scale, offset and per_token_scale do not go with a weight quantized alone");
    require(type_of(call.antiquant_scale) == dtype, "antiquant_scale must be given, of x's dtype");
    require(is_one_of(type_of(call.antiquant_offset), {kNone, dtype}), "antiquant_offset must be of x's dtype");
    require(a5 || int4 || call.antiquant_offset.size(), "an int8 weight needs antiquant_offset");
    require(bias == kNone || bias == (dtype == at::kBFloat16 ? at::kFloat : dtype) ||
                (a5 && bias == dtype),
            "bias must be float32 for bfloat16 x, and float16 for float16, not " + text(bias));
    require(call.act_type == 0, "act_type goes with int8 x and weight");
    require(!call.weight[0].is_nz() && !call.weight_nz,
            "an int8 or int4 weight beside float16 or bfloat16 x must be in ND");
    size_t grouped_dims = call.single_weight() ? 3 : 2;
    for (size_t i = 0; i < call.weight.size(); ++i) {
        const auto& scale = call.antiquant_scale[i];
        bool by_group = scale.dim() == int64_t(grouped_dims);
        require(!by_group || int4, "antiquant_scale for groups of rows goes with int4 weights");
        std::vector<int64_t> shape{call.columns(i)};
        if (by_group) {
            int64_t groups = scale.size(-2), inner = call.inner(i);
            require(groups > 0 && inner % groups == 0,
                    "the number of groups of antiquant_scale must divide K = " + number(inner));
            require(!call.weight[i].is_transposed() || inner / groups % 2 == 0,
                    "a transposed int4 weight needs groups of an even number of rows");
            require(inner / groups == call.inner(0) / call.antiquant_scale[0].size(-2),
                    "the groups of all weights must have one size");
            int64_t size = inner / groups;
            require(!a5 || size == 32 || size == 64 || size == 128 || size == 256,
                    "the groups of rows must be of 32, 64, 128 or 256");
            require(a5 || !call.antiquant_offset.size(),
                    "antiquant_offset goes with an antiquant_scale for each column");
            shape.insert(shape.begin(), groups);
        }
        if (call.single_weight()) shape.insert(shape.begin(), call.experts());
        require(scale.sizes() == at::IntArrayRef(shape),
                "antiquant_scale should be " + shown(shape) + ", but is " + shown(scale.sizes()));
        require(!call.antiquant_offset.size() || call.antiquant_offset[i].sizes() == scale.sizes(),
                "antiquant_offset must have the shape of antiquant_scale");
    }
}

}  // namespace

Precision GroupedCall::precision() const {
    if (x[0].dtype() == at::kChar && is_int4()) return Precision::mixed;
    if (x[0].dtype() == at::kChar || x[0].dtype() == at::kInt) return Precision::int8;
    return weight[0].dtype() == x[0].dtype() ? Precision::plain : Precision::weight_only;
}

void check_types(const GroupedCall& call, Line line) {
    check_lists(call, line);
    check_settings(call);
    switch (call.precision()) {
        case Precision::plain:
            return check_plain(call, line);
        case Precision::int8:
            return check_int8(call, line);
        case Precision::mixed:
            return check_mixed(call, line);
        case Precision::weight_only:
            return check_weight_only(call, line);
    }
}

}  // namespace emulator
