// Products of groups of rows with a matrix each, for mixtures of experts.
#include "grouped_matmul.h"

#include "numeric.h"
#include "product.h"
#include "quantize.h"

namespace {

using namespace emulator;

// A product to be computed: its rows, its matrix, where its result goes, and where its rows begin among all.
struct Piece {
    at::Tensor x;
    int64_t expert, begin;
    at::Tensor out;
};

std::vector<Group> all_groups(const GroupedCall& call, int64_t rows) {
    if (!call.ends) return groups_of(call.group_list.tensor(), call.list_type, rows, call.experts());
    return groups_of(at::tensor(*call.ends, at::kLong), kEnds, rows, call.experts());
}

// x and weight side by side: each pair is a group.
std::vector<Piece> separate_pieces(const GroupedCall& call) {
    bool one_out = call.out.size() == 1 && call.x.size() > 1;
    std::vector<Piece> pieces;
    int64_t begin = 0;
    for (size_t i = 0; i < call.x.size(); ++i) {
        auto x = call.x[i].tensor();
        int64_t rows = x.size(0);
        auto out = one_out ? call.out[0].raw().narrow(0, begin, rows) : call.out[i].raw();
        pieces.push_back({x, int64_t(i), begin, out});
        begin += rows;
    }
    return pieces;
}

DOCUMENTED("ops-transformer: gmm/grouped_matmul/docs/aclnnGroupedMatmulV5.md");
void check_separate_rows(const GroupedCall& call, const std::vector<Piece>& pieces) {
    const auto& last = pieces.back();
    for (const auto& group : all_groups(call, last.begin + last.x.size(0)))
        if (group.rows != call.x[group.expert].size(0))
            throw std::runtime_error("group_list gives group " + std::to_string(group.expert) + " " +
                                     std::to_string(group.rows) + " rows, but its x has " +
                                     std::to_string(call.x[group.expert].size(0)));
}

std::vector<Piece> row_pieces(const GroupedCall& call) {
    if (call.x.size() > 1) {
        auto pieces = separate_pieces(call);
        if (call.has_list()) check_separate_rows(call, pieces);
        return pieces;
    }
    auto x = call.x[0].tensor();
    std::vector<Piece> pieces;
    for (const auto& group : all_groups(call, x.size(0))) {
        auto out = call.out.size() > 1 ? call.out[group.expert].raw()
                                       : call.out[0].raw().narrow(0, group.begin, group.rows);
        pieces.push_back({x.narrow(0, group.begin, group.rows), group.expert, group.begin, out});
    }
    return pieces;
}

// The parameters of an expert: a row of one tensor, or a tensor of its own.
at::Tensor of_expert(const GroupedCall& call, const Ins& list, int64_t expert) {
    return call.single_weight() ? list[0].tensor().select(0, expert) : list[expert].tensor();
}

at::Tensor expert_matrix(const GroupedCall& call, int64_t expert) {
    const auto& weight = call.weight[call.single_weight() ? 0 : expert];
    auto values = weight.matrix(call.single_weight() ? expert : 0);
    if (!call.is_int4()) return values;
    return weight.is_transposed() ? unpack_int4(values.t()).t() : unpack_int4(values);
}

// For each weight, or for each column of it.
at::Tensor spread(const at::Tensor& factors, int64_t rows) {
    auto values = factors.to(at::kFloat);
    return values.dim() == 2 ? values.repeat_interleave(rows / values.size(0), 0) : values;
}

at::Tensor product(const GroupedCall& call, const at::Tensor& x, int64_t expert) {
    auto weight = expert_matrix(call, expert);
    if (call.precision() == Precision::int8) return integer_product(x, weight);
    if (call.precision() == Precision::plain) return wide_product(x, weight);
    auto values = weight.to(at::kFloat);
    if (call.antiquant_offset.size())
        values = values + spread(of_expert(call, call.antiquant_offset, expert), values.size(0));
    return at::matmul(widen(x), values * spread(of_expert(call, call.antiquant_scale, expert), values.size(0)));
}

at::Tensor activated(const at::Tensor& values, int64_t type) {
    switch (type) {
        case 1:
            return at::relu(values);
        case 2:
            return at::gelu(values, "tanh");
        case 4:
            return values * at::sigmoid(1.702 * values);
        case 5:
            return at::silu(values);
        default:
            return values;
    }
}

// The kernel subtracts 8 from x, and expects bias to add it again, as 8 times the sums of the scaled weight.
DOCUMENTED("ops-transformer: gmm/grouped_matmul/docs/aclnnGroupedMatmulV5.md (A8W4)");
void compute_mixed(const GroupedCall& call, const Piece& piece) {
    auto weight = expert_matrix(call, piece.expert).to(at::kFloat);
    auto factors = spread(scale_of(of_expert(call, call.scale, piece.expert)), weight.size(0));
    auto values = at::matmul(piece.x.to(at::kFloat) - 8, weight * factors) + of_expert(call, call.bias, piece.expert);
    auto by_row = call.token_scale[0].tensor().narrow(0, piece.begin, values.size(0)).unsqueeze(1);
    piece.out.copy_(values * by_row);
}

void compute(const GroupedCall& call, const Piece& piece) {
    if (piece.out.numel() == 0) return;
    if (call.precision() == Precision::mixed) return compute_mixed(call, piece);
    auto values = product(call, piece.x, piece.expert);
    auto bias = call.bias.size() ? of_expert(call, call.bias, piece.expert) : at::Tensor();
    if (bias.defined() && bias.scalar_type() == at::kInt) values = values.to(at::kDouble) + bias;
    if (piece.out.scalar_type() == at::kInt) {
        piece.out.copy_(values);  // the scale has no effect
        return;
    }
    values = values.to(at::kFloat);
    if (call.scale.size()) values = values * scale_of(of_expert(call, call.scale, piece.expert));
    if (call.token_scale.size())
        values = values * call.token_scale[0].tensor().narrow(0, piece.begin, values.size(0)).unsqueeze(1);
    if (bias.defined() && bias.scalar_type() != at::kInt) values = values + bias.to(at::kFloat);
    values = activated(values, call.act_type);
    if (piece.out.scalar_type() == at::kChar) {
        values = values + offset_of(of_expert(call, call.scale, piece.expert));
        values = at::round(values).clamp(-128, 127);
    }
    piece.out.copy_(values);
}

// Groups of the inner dimension: a product of all rows for each.
void compute_inner(const GroupedCall& call) {
    auto x = widen(call.x[0]);
    if (!call.has_list()) {
        int64_t begin = 0;
        for (size_t i = 0; i < call.weight.size(); ++i) {
            auto weight = widen(call.weight[i]);
            call.out[i].set(at::matmul(x.narrow(1, begin, weight.size(0)), weight));
            begin += weight.size(0);
        }
        return;
    }
    auto weight = widen(call.weight[0]);
    auto out = call.out[0].raw();
    for (const auto& group : groups_of(call.group_list.tensor(), call.list_type, x.size(1), out.size(0)))
        out.select(0, group.expert)
            .copy_(at::matmul(x.narrow(1, group.begin, group.rows), weight.narrow(0, group.begin, group.rows)));
}

// Rows beyond the last group keep what the memory held.
void run_grouped(const GroupedCall& call) {
    if (call.group_type == 2) return compute_inner(call);
    for (const auto& piece : call.group_type == 0 ? row_pieces(call) : separate_pieces(call)) compute(call, piece);
}

// As if every row had a group.
double count_grouped(const GroupedCall& call) {
    double flops = 0;
    if (call.group_type == 2)
        for (const auto& weight : call.weight.items) flops += 2.0 * call.x[0].size(0) * weight.raw().numel();
    else
        for (size_t i = 0; i < call.x.size(); ++i)
            flops += 2.0 * call.x[i].raw().numel() * call.columns(call.weight.size() == call.x.size() ? i : 0);
    return flops;
}

DOCUMENTED("ops-transformer: gmm/grouped_matmul/docs/aclnnGroupedMatmulV5.md");
void check_reserved(const Ins& activation_input, const Ins& activation_quant_scale, const Ins& activation_quant_offset,
                    const Outs& activation_feature, const Outs& dynamic_scale) {
    require(!activation_input.size() && !activation_quant_scale.size() && !activation_quant_offset.size() &&
                !activation_feature.size() && !dynamic_scale.size(),
            "activation_input, activation_quant_scale, activation_quant_offset and the outputs beside y are reserved");
}

DOCUMENTED("ops-transformer: gmm/grouped_matmul/docs/aclnnGroupedMatmulV5.md");
void check_tuning(const Ints& tuning, const Ins& x) {
    require(!tuning.size() || (tuning[0] >= 0 && tuning[0] <= x[0].size(0)),
            "tuning_config must begin with the rows expected of a group, from 0 to all");
}

// Of int4 weights, which are refused elsewhere.
DOCUMENTED("ops-transformer: gmm/grouped_matmul/docs/aclnnGroupedMatmulWeightNz.md");
void check_group_size(int64_t quant_group_size) {
    require(quant_group_size == 0, "quant_group_size must be 0 unless the weight is quantized in groups of rows");
}

}  // namespace

#define OPERANDS \
    Ins x, Weights weight, Ins bias, Ins scale, Ins offset, Ins antiquant_scale, Ins antiquant_offset
#define SETTINGS int64_t split_item, int64_t group_type, int64_t list_type, int64_t act_type
#define RESERVED Ins activation_input, Ins activation_quant_scale, Ins activation_quant_offset
#define MORE_OUT Outs out, Outs activation_feature, Outs dynamic_scale
#define GIVEN                                                                                                     \
    GroupedCall {                                                                                                 \
        x, weight, bias, scale, offset, antiquant_scale, antiquant_offset, token_scale, group_list, std::nullopt, \
            split_item, group_type, list_type, act_type, out                                                      \
    }

#define VERSION(name, nz, check_more, ...)                                                                           \
    static void check_##name(OPERANDS, Ins token_scale, In group_list, RESERVED, SETTINGS __VA_ARGS__, MORE_OUT) {   \
        check_reserved(activation_input, activation_quant_scale, activation_quant_offset, activation_feature,        \
                       dynamic_scale);                                                                               \
        auto call = GIVEN;                                                                                           \
        call.weight_nz = nz;                                                                                         \
        check_grouped(call);                                                                                         \
        check_more;                                                                                                  \
    }                                                                                                                \
    static double flops_##name(OPERANDS, Ins token_scale, In group_list, RESERVED, SETTINGS __VA_ARGS__, MORE_OUT) { \
        return count_grouped(GIVEN);                                                                                 \
    }                                                                                                                \
    static void name(OPERANDS, Ins token_scale, In group_list, RESERVED, SETTINGS __VA_ARGS__, MORE_OUT) {           \
        run_grouped(GIVEN);                                                                                          \
    }                                                                                                                \
    ACLNN(name, .check = check_##name, .flops = flops_##name)

#define COMMA ,
VERSION(GroupedMatmulV4, false, )
VERSION(GroupedMatmulV5, false, check_tuning(tuning, x), COMMA Ints tuning)
VERSION(GroupedMatmulWeightNz, true, (check_tuning(tuning, x), check_group_size(quant_group_size)),
        COMMA Ints tuning COMMA int64_t quant_group_size)

// The first version has groups of rows only: none where x and y are apart.
static GroupedCall first_version(OPERANDS, const Ints& ends, int64_t split_item, const Outs& out) {
    std::optional<std::vector<int64_t>> given;
    if (ends && ends.size()) given = ends.values;
    bool apart = out.size() > 1 && x.size() > 1;
    return {x, weight, bias, scale, offset, antiquant_scale, antiquant_offset, Ins(nullptr), In(nullptr), given,
            split_item, apart || (out.size() == 1 && x.size() == 1 && !given) ? -1 : 0, kEnds, 0, out};
}

static void check_GroupedMatmul(OPERANDS, Ints ends, int64_t split_item, Outs out) {
    check_grouped_v1(first_version(x, weight, bias, scale, offset, antiquant_scale, antiquant_offset, ends, split_item,
                                   out));
}
static double flops_GroupedMatmul(OPERANDS, Ints ends, int64_t split_item, Outs out) {
    return count_grouped(first_version(x, weight, bias, scale, offset, antiquant_scale, antiquant_offset, ends,
                                       split_item, out));
}
static void GroupedMatmul(OPERANDS, Ints ends, int64_t split_item, Outs out) {
    run_grouped(first_version(x, weight, bias, scale, offset, antiquant_scale, antiquant_offset, ends, split_item,
                              out));
}
ACLNN(GroupedMatmul, .check = check_GroupedMatmul, .flops = flops_GroupedMatmul)
