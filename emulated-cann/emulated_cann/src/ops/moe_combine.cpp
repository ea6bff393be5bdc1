// The way back of tokens from the ranks of their experts, and their weighted sum, in one launch.
#include "moe_distribute.h"

namespace {

using namespace emulator;

struct Combine {
    Distribution d;
    In rows, ids, assist, rank_counts, weights, mask, shared;
    Out out;
    int64_t row_bytes() const { return d.hidden * c10::elementSize(rows.dtype()); }
    bool is_weighted() const { return !is_empty(weights); }
};

// What a rank sends back: its rows in the order in which the dispatch received them, and where each came from.
class Returned {
  public:
    Returned(char* data, const Combine& c) : base(data), c(c) {}
    int64_t& expected() const { return reinterpret_cast<int64_t*>(base)[0]; }  // choices of this rank's own tokens
    int64_t& tokens() const { return reinterpret_cast<int64_t*>(base)[1]; }
    int64_t& has_inactive() const { return reinterpret_cast<int64_t*>(base)[2]; }
    int64_t* ends() const { return reinterpret_cast<int64_t*>(base) + 3; }  // of each expert's rows for each rank
    int64_t begin(int64_t block) const { return block ? ends()[block - 1] : 0; }
    int64_t total() const { return ends()[c.d.experts - 1]; }
    int64_t count_for(uint32_t rank) const {
        int64_t count = 0;
        for (int64_t block = rank; block < c.d.experts; block += c.d.ranks) count += ends()[block] - begin(block);
        return count;
    }
    at::Tensor sources() const { return in_slot(after_ends(), {total(), 3}, at::kInt); }  // rank, token and choice
    at::Tensor rows() const { return in_slot(after_ends() + 12 * total(), {total(), c.d.hidden}, c.rows.dtype()); }
    static size_t most_bytes(const Combine& c) { return 8 * (3 + c.d.experts) + c.rows.size(0) * (12 + c.row_bytes()); }

  private:
    char* after_ends() const { return base + 8 * (3 + c.d.experts); }
    char* base;
    const Combine& c;
};

DOCUMENTED(
    "op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_distribute_combine_v2.md"
    "; ops-transformer: mc2/moe_distribute_combine_v2/docs/aclnnMoeDistributeCombineV4.md");
void check(const Combine& c) {
    bool may_be_unweighted = product() == Product::ascend950 && !c.d.is_first;
    require_tiling(c.is_weighted() || may_be_unweighted, "expert_scales must not be empty");
    check_tokens(c.d, c.rows, c.ids, c.mask, c.is_weighted() ? c.weights : In(nullptr), "expand_x");
    require_tiling(c.rows.size(0) >= c.d.most_rows(),
                   "expand_x must have at least " + text(c.d.most_rows()) + " rows, but has " + text(c.rows.size(0)));
    require(c.rank_counts.dtype() == at::kInt && c.assist.dtype() == at::kInt,
            "ep_send_counts and assist_info_for_combine must be int32");
    require_tiling(elements_of(c.rank_counts) >= c.d.experts,
                   "ep_send_counts must have at least " + text(c.d.experts) + " elements");
    int64_t assist = c.d.is_first ? c.d.tokens * c.d.choices : 128 * c.rows.size(0);
    require_tiling(elements_of(c.assist) >= assist,
                   "assist_info_for_combine must have at least " + text(assist) + " elements");
    require(c.out.dtype() == c.rows.dtype(), "the output must have the dtype of expand_x, " + text(c.rows.dtype()));
    require_tiling(has_shape(c.out, {c.d.tokens, c.d.hidden}), "the output must have the shape [BS, H]");
    if (!c.shared) return;
    require_tiling(product() != Product::a2, "shared_expert_x must be omitted on Atlas A2");
    require(c.shared.dtype() == c.rows.dtype(), "shared_expert_x must have the dtype of expand_x");
    require_tiling(elements_of(c.shared) == c.d.tokens * c.d.hidden && c.shared.size(-1) == c.d.hidden &&
                       (c.shared.dim() == 2 || c.shared.dim() == 3),
                   "shared_expert_x must be [BS, H], or of 3 dimensions with as many elements");
}

void send(const Combine& c, char* slot) {
    auto active = active_choices(c.d, c.mask);
    Returned sent(slot, c);
    sent.expected() = active.sum().item<int64_t>();
    sent.tokens() = c.d.tokens;
    sent.has_inactive() = sent.expected() < active.numel();
    auto ends = in_slot(reinterpret_cast<char*>(sent.ends()), {c.d.experts}, at::kLong);
    ends.copy_(c.rank_counts.raw().narrow(0, 0, c.d.experts));
    bool ascends = sent.ends()[0] >= 0 && ends.diff().ge(0).all().item<bool>() && sent.total() <= c.rows.size(0);
    UNDEFINED("hardware would send other rows, or wait without end");
    if (!ascends)
        throw std::runtime_error("ep_send_counts must be the ep_recv_counts of the dispatch, which ascend to at most " +
                                 text(c.rows.size(0)));
    if (!c.d.is_first) {
        auto sources = c.assist.raw().narrow(0, 0, 3 * sent.total()).view({-1, 3});
        sent.sources().copy_(sources);
    }
    sent.rows().copy_(c.rows.tensor().narrow(0, 0, sent.total()));
}

std::string mismatch(const Combine& c, const Turn& turn) {
    if (auto reason = find_disagreement(turn, agreed_numbers(c.d)); !reason.empty()) return reason;
    bool differs = false, has_inactive = false;
    for (uint32_t to = 0; to < turn.ranks(); ++to) {
        Returned own(turn.data(to), c);
        differs = differs || own.tokens() != Returned(turn.data(0), c).tokens();
        has_inactive = has_inactive || own.has_inactive();
        int64_t sent = 0;
        for (uint32_t from = 0; from < turn.ranks(); ++from) sent += Returned(turn.data(from), c).count_for(to);
        if (sent != own.expected())
            return "the tokens of rank " + text(int64_t{to}) + " have " + text(own.expected()) + " choices, but " +
                   text(sent) + " rows come back: ep_send_counts and x_active_mask must be those of the dispatch";
    }
    bool is_wrong = differs && has_inactive;
    return is_wrong ? "x_active_mask must select all tokens if ranks have different numbers of tokens" : "";
}

// The rows of a rank that are this rank's, and the choices of its tokens that they are the results of.
std::pair<at::Tensor, at::Tensor> own_rows(const Combine& c, const Turn& turn, uint32_t from) {
    Returned sent(turn.data(from), c);
    std::vector<at::Tensor> rows, choices;
    int64_t local = c.d.local_experts();
    auto experts = c.d.is_first ? active_experts(c.d, c.ids, c.mask).view(-1) : at::Tensor();
    for (int64_t expert = 0; expert < local; ++expert) {
        int64_t block = expert * turn.ranks() + turn.rank();
        auto range = at::arange(sent.begin(block), sent.ends()[block], at::kLong);
        if (!c.d.is_first) {
            auto source = sent.sources().index_select(0, range).to(at::kLong);
            auto is_own = source.select(1, 0).eq(int64_t{turn.rank()}).all().item<bool>();
            UNDEFINED("hardware would add other rows, or wait without end");
            if (!is_own) throw std::runtime_error("assist_info_for_combine must be that of the dispatch");
            rows.push_back(range);
            choices.push_back(source.select(1, 1) * c.d.choices + source.select(1, 2));
            continue;
        }
        auto which = experts.eq(int64_t{from} * local + expert).nonzero().squeeze(1);
        choices.push_back(which);
        rows.push_back(c.assist.raw().index_select(0, which).to(at::kLong) + sent.begin(block));
    }
    return {at::cat(rows), at::cat(choices)};
}

void receive(const Combine& c, const Turn& turn) {
    int64_t tokens = c.d.tokens, choices = c.d.choices;
    auto results = at::zeros({tokens * choices, c.d.hidden}, at::kFloat);
    auto arrived = at::zeros({tokens * choices}, at::kLong);
    for (uint32_t from = 0; from < turn.ranks(); ++from) {
        Returned sent(turn.data(from), c);
        auto [rows, places] = own_rows(c, turn, from);
        bool is_inside = rows.ge(0).logical_and(rows.lt(sent.total())).all().item<bool>() &&
                         places.ge(0).logical_and(places.lt(tokens * choices)).all().item<bool>();
        UNDEFINED("hardware would add other rows, or wait without end");
        if (!is_inside)
            throw std::runtime_error("the result of a choice must be in expand_x: give combine the dispatch's outputs");
        results.index_copy_(0, places, sent.rows().index_select(0, rows).to(at::kFloat));
        arrived.index_add_(0, places, at::ones_like(places));
    }
    auto active = active_choices(c.d, c.mask);
    UNDEFINED("hardware would add other rows, or wait without end");
    if (!arrived.view({tokens, choices}).eq(active.to(at::kLong)).all().item<bool>())
        throw std::runtime_error("each choice of a token must have one result: give combine the dispatch's outputs");
    auto sum = at::zeros({tokens, c.d.hidden}, at::kFloat);
    for (int64_t choice = 0; choice < choices; ++choice) {
        auto values = results.view({tokens, choices, -1}).select(1, choice);
        if (c.is_weighted()) {
            auto weight = at::where(active.select(1, choice), c.weights.tensor().select(1, choice), 0.0);
            values = values * weight.unsqueeze(1);
        }
        sum.add_(values);
    }
    if (c.shared) sum.add_(c.shared.tensor().reshape({tokens, -1}));
    auto which = active.any(1).nonzero().squeeze(1);  // the rows of tokens without a choice are not written
    if (which.size(0) == tokens) return c.out.set(sum);
    c.out.raw().index_copy_(0, which, sum.index_select(0, which).to(c.out.dtype()));
}

Fused combine(const Combine& c) {
    Fused made{check_distribution(c.d), collective_of(c.rows.dtype(), c.d.hidden, false)};
    check(c);
    set_bytes(made.collective, Returned::most_bytes(c));
    require_agreement(made.collective, agreed_numbers(c.d));
    made.collective.mismatch = [c](const Turn& turn) { return mismatch(c, turn); };
    made.collective.put = [c](char* slot) { send(c, slot); };
    made.collective.take = [c](const Turn& turn) { receive(c, turn); };
    return made;
}

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_distribute_combine_v2.md");
void check_reserved(const In& activation_scale, const In& weight_scale, const In& group_list, int64_t quant_mode,
                    int64_t type, int64_t list_type) {
    bool has_reserved =
        is_given(activation_scale) || is_given(weight_scale) || is_given(group_list) || type != 0 || list_type != 0;
    require_tiling(!has_reserved,
                   "activation_scale, weight_scale, group_list, out_dtype and group_list_type are reserved");
    if (quant_mode == 2) throw NotEmulated("comm_quant_mode 2 is not emulated");
    require_tiling(quant_mode == 0, "comm_quant_mode must be 0 or 2, but is " + text(quant_mode));
}

Fused MoeDistributeCombineV4(In rows, In ids, In assist, In rank_counts, In weights, In, In mask, In activation_scale,
                             In weight_scale, In group_list, In, In shared, In elastic, In, In, In, In, In performance,
                             Text group, int64_t ranks, int64_t rank, int64_t experts, Text, int64_t tp_ranks, int64_t,
                             int64_t shard_type, int64_t shared_experts, int64_t shared_ranks, int64_t global_tokens,
                             int64_t type, int64_t quant_mode, int64_t list_type, Text algorithm, int64_t zero,
                             int64_t copies, int64_t constant, Out out) {
    check_reserved(activation_scale, weight_scale, group_list, quant_mode, type, list_type);
    require_absent(elastic, "elastic_info");
    require_absent(performance, "performance_info");
    auto d = distribution_of(false, false, group, ranks, rank, experts, tp_ranks, shard_type, shared_experts,
                             shared_ranks, global_tokens, rows, ids);
    d.algorithm = algorithm;
    d.special_experts = zero + copies + constant;
    return combine({d, rows, ids, assist, rank_counts, weights, mask, shared, out});
}

Fused MoeDistributeCombineV3(In rows, In ids, In assist, In rank_counts, In weights, In tp_counts, In mask,
                             In activation_scale, In weight_scale, In group_list, In row_weights, In shared, In elastic,
                             In x, In alpha1, In alpha2, In v, Text group, int64_t ranks, int64_t rank, int64_t experts,
                             Text group_tp, int64_t tp_ranks, int64_t tp_rank, int64_t shard_type,
                             int64_t shared_experts, int64_t shared_ranks, int64_t global_tokens, int64_t type,
                             int64_t quant_mode, int64_t list_type, Text algorithm, int64_t zero, int64_t copies,
                             int64_t constant, Out out) {
    return MoeDistributeCombineV4(rows, ids, assist, rank_counts, weights, tp_counts, mask, activation_scale,
                                  weight_scale, group_list, row_weights, shared, elastic, x, alpha1, alpha2, v, nullptr,
                                  group, ranks, rank, experts, group_tp, tp_ranks, tp_rank, shard_type, shared_experts,
                                  shared_ranks, global_tokens, type, quant_mode, list_type, algorithm, zero, copies,
                                  constant, out);
}

Fused MoeDistributeCombineV2(In rows, In ids, In assist, In rank_counts, In weights, In tp_counts, In mask,
                             In activation_scale, In weight_scale, In group_list, In row_weights, In shared, Text group,
                             int64_t ranks, int64_t rank, int64_t experts, Text group_tp, int64_t tp_ranks,
                             int64_t tp_rank, int64_t shard_type, int64_t shared_experts, int64_t shared_ranks,
                             int64_t global_tokens, int64_t type, int64_t quant_mode, int64_t list_type, Text algorithm,
                             Out out) {
    return MoeDistributeCombineV4(rows, ids, assist, rank_counts, weights, tp_counts, mask, activation_scale,
                                  weight_scale, group_list, row_weights, shared, nullptr, nullptr, nullptr, nullptr,
                                  nullptr, nullptr, group, ranks, rank, experts, group_tp, tp_ranks, tp_rank,
                                  shard_type, shared_experts, shared_ranks, global_tokens, type, quant_mode, list_type,
                                  algorithm, 0, 0, 0, out);
}

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_distribute_combine.md");
Fused MoeDistributeCombine(In rows, In ids, In places, In rank_counts, In weights, In, In mask, In activation_scale,
                           In weight_scale, In group_list, In, Text group, int64_t ranks, int64_t rank, int64_t experts,
                           Text, int64_t tp_ranks, int64_t, int64_t shard_type, int64_t shared_experts,
                           int64_t shared_ranks, int64_t global_tokens, int64_t type, int64_t quant_mode,
                           int64_t list_type, Out out) {
    check_reserved(activation_scale, weight_scale, group_list, quant_mode, type, list_type);
    require_tiling(!is_given(mask), "x_active_mask is reserved");
    auto d = distribution_of(false, true, group, ranks, rank, experts, tp_ranks, shard_type, shared_experts,
                             shared_ranks, global_tokens, rows, ids);
    return combine({d, rows, ids, places, rank_counts, weights, nullptr, nullptr, out});
}

}  // namespace

ACLNN(MoeDistributeCombineV4, .workspace = kFusedWorkspace)
ACLNN(MoeDistributeCombineV3, .workspace = kFusedWorkspace)
ACLNN(MoeDistributeCombineV2, .workspace = kFusedWorkspace)
ACLNN(MoeDistributeCombine, .workspace = kFusedWorkspace)
