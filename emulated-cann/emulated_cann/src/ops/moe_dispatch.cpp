// The dispatch of tokens to the ranks of their experts, in one launch.
#include <numeric>
#include <utility>

#include "moe_distribute.h"

namespace {

using namespace emulator;

struct Dispatch {
    Distribution d;
    In x, ids, scales, mask, weights;
    int64_t quant_mode, counts_type;
    Out rows, row_scales, assist, expert_counts, rank_counts, row_weights;
    bool is_quantized() const { return quant_mode == 2; }
    at::ScalarType row_type() const { return is_quantized() ? at::kChar : x.dtype(); }
    size_t row_bytes() const { return d.hidden * c10::elementSize(row_type()); }
};

// What a rank sends: how many choices each expert has, and the choices in the order of their experts.
class Sent {
  public:
    Sent(char* data, const Dispatch& c) : base(data), c(c) {}
    int64_t& tokens() const { return reinterpret_cast<int64_t*>(base)[0]; }
    int64_t& has_inactive() const { return reinterpret_cast<int64_t*>(base)[1]; }
    int64_t* counts() const { return reinterpret_cast<int64_t*>(base) + 2; }  // by expert; written before what follows
    int64_t total() const { return std::accumulate(counts(), counts() + c.d.experts, int64_t{0}); }
    at::Tensor places() const { return in_slot(after_counts(), {total()}, at::kLong); }  // in expert_ids
    at::Tensor weights() const { return in_slot(after_counts() + 8 * total(), {total()}, at::kFloat); }
    at::Tensor scales() const { return in_slot(after_counts() + 12 * total(), {total()}, at::kFloat); }
    at::Tensor rows() const { return in_slot(after_counts() + 16 * total(), {total(), c.d.hidden}, c.row_type()); }
    static size_t most_bytes(const Dispatch& c) {
        return 8 * (2 + c.d.experts) + c.d.tokens * c.d.choices * (16 + c.row_bytes());
    }

  private:
    char* after_counts() const { return base + 8 * (2 + c.d.experts); }
    char* base;
    const Dispatch& c;
};

DOCUMENTED(
    "op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_distribute_dispatch_v2.md"
    "; ops-transformer: mc2/moe_distribute_dispatch_v2/docs/aclnnMoeDistributeDispatchV4.md");
void check(const Dispatch& c) {
    check_tokens(c.d, c.x, c.ids, c.mask, c.weights, "x");
    bool is_known = c.quant_mode == 0 || c.quant_mode == 2;
    if (!is_known && product() == Product::ascend950 && c.quant_mode > 0 && c.quant_mode < 5)
        throw NotEmulated("quant_mode " + text(c.quant_mode) + " is not emulated");
    require_tiling(is_known, "quant_mode must be 0 or 2, but is " + text(c.quant_mode));
    require_tiling(c.counts_type == 0 || c.counts_type == 1,
                   "expert_token_nums_type must be 0 or 1, but is " + text(c.counts_type));
    require_tiling(c.is_quantized() || !is_given(c.scales), "scales require quant_mode 2");
    if (is_given(c.scales)) {
        require_tensor(c.scales, at::kFloat, {c.d.experts, c.d.hidden}, "scales");
        require(c.scales.raw().is_contiguous(), "scales must be contiguous");
    }
    int64_t most = c.d.most_rows();
    require_tiling(
        c.rows.dim() == 2 && c.rows.size(0) >= most && c.rows.size(1) == c.d.hidden,
        "expand_x must be [A, H] with A of at least " + text(most) + ", but has shape " + shown(c.rows.sizes()));
    require(c.rows.dtype() == c.row_type(), "expand_x must be " + text(c.row_type()) + ", not " + text(c.rows.dtype()));
    require_tensor(c.expert_counts, at::kLong, {c.d.local_experts()}, "expert_token_nums");
    require(c.rank_counts.dtype() == at::kInt && c.assist.dtype() == at::kInt,
            "ep_recv_counts and assist_info_for_combine must be int32");
    require_tiling(elements_of(c.rank_counts) >= c.d.experts,
                   "ep_recv_counts must have at least " + text(c.d.experts) + " elements");
    int64_t assist = c.d.is_first ? c.d.tokens * c.d.choices : 128 * c.rows.size(0);
    require_tiling(elements_of(c.assist) >= assist,
                   "assist_info_for_combine must have at least " + text(assist) + " elements");
    bool has_scales = c.row_scales && c.row_scales.dtype() == at::kFloat && elements_of(c.row_scales) >= most;
    require(!c.is_quantized() || has_scales, "dynamic_scales must be float32 [A]");
    bool has_weights = c.row_weights && c.row_weights.dtype() == at::kFloat && elements_of(c.row_weights) >= most;
    require(!c.weights || has_weights, "expand_scales must be float32 [A] if expert_scales is given");
}

void send(const Dispatch& c, char* slot) {
    auto experts = active_experts(c.d, c.ids, c.mask);
    auto sorted = sort_choices(experts, 0, c.d.experts);
    Sent sent(slot, c);
    sent.tokens() = c.d.tokens;
    sent.has_inactive() = sorted.active < experts.numel();
    in_slot(reinterpret_cast<char*>(sent.counts()), {c.d.experts}, at::kLong).copy_(count_choices(sorted, c.d.experts));
    auto places = sorted.places.narrow(0, 0, sorted.active);
    sent.places().copy_(places);
    if (c.weights) sent.weights().copy_(c.weights.tensor().reshape(-1).index_select(0, places));
    auto rows = c.x.tensor().index_select(0, at::div(places, c.d.choices, "floor"));
    if (!c.is_quantized()) {
        sent.rows().copy_(rows);
        return;
    }
    rows = rows.to(at::kFloat);
    if (is_given(c.scales)) rows = rows * c.scales.tensor().index_select(0, sorted.experts);
    auto quantized = quantize_each(rows);
    sent.rows().copy_(quantized.values);
    sent.scales().copy_(quantized.scales);
}

// This rank's rows: by expert, within an expert by the rank that sends them, and then by token.
void receive(const Dispatch& c, const Turn& turn) {
    int64_t first = c.d.first_expert(), at_row = 0;
    std::vector<int64_t> next, counts(c.d.local_experts());
    for (uint32_t from = 0; from < turn.ranks(); ++from) {
        auto* sent = Sent(turn.data(from), c).counts();
        next.push_back(std::accumulate(sent, sent + first, int64_t{0}));
    }
    std::vector<int32_t> rank_counts;
    for (int64_t expert = 0; expert < c.d.local_experts(); ++expert) {
        for (uint32_t from = 0; from < turn.ranks(); ++from) {
            Sent sent(turn.data(from), c);
            int64_t count = sent.counts()[first + expert], begin = std::exchange(next[from], next[from] + count);
            auto copy = [&](const Out& out, const at::Tensor& values) {
                out.raw().narrow(0, at_row, count).copy_(values.narrow(0, begin, count));
            };
            if (count) {
                copy(c.rows, sent.rows());
                if (c.is_quantized()) copy(c.row_scales, sent.scales());
                if (c.weights) copy(c.row_weights, sent.weights());
            }
            if (count && !c.d.is_first) {
                auto place = sent.places().narrow(0, begin, count);
                auto source = at::full({count}, int64_t{from}, at::kLong);
                auto token = at::div(place, c.d.choices, "floor"), choice = at::remainder(place, c.d.choices);
                auto triples = at::stack({source, token, choice}, 1).reshape(-1);
                c.assist.raw().narrow(0, 3 * at_row, 3 * count).copy_(triples);
            }
            at_row += count;
            counts[expert] += count;
            rank_counts.push_back(static_cast<int32_t>(at_row));
        }
    }
    c.rank_counts.raw().narrow(0, 0, c.d.experts).copy_(at::tensor(rank_counts, at::kInt));
    auto by_expert = at::tensor(counts, at::kLong);
    c.expert_counts.set(c.counts_type == 0 ? by_expert.cumsum(0) : by_expert);
    if (!c.d.is_first) return;
    Sent own(turn.data(turn.rank()), c);  // the place of each choice among those of its expert that this rank sends
    auto sent = at::from_blob(own.counts(), {c.d.experts}, at::TensorOptions().dtype(at::kLong));
    auto starts = at::repeat_interleave(sent.cumsum(0) - sent, sent);
    c.assist.raw().index_put_({own.places()}, (at::arange(own.total(), at::kLong) - starts).to(at::kInt));
}

std::vector<Agreed> agreed(const Dispatch& c) {
    auto numbers = agreed_numbers(c.d);
    numbers.push_back({"quant_mode", c.quant_mode});
    numbers.push_back({"the presence of expert_scales", bool(c.weights)});
    return numbers;
}

std::string mismatch(const Dispatch& c, const Turn& turn) {
    if (auto reason = find_disagreement(turn, agreed(c)); !reason.empty()) return reason;
    bool differs = false, has_inactive = false;
    for (uint32_t each = 0; each < turn.ranks(); ++each) {
        Sent sent(turn.data(each), c);
        differs = differs || sent.tokens() != Sent(turn.data(0), c).tokens();
        has_inactive = has_inactive || sent.has_inactive();
    }
    bool is_wrong = differs && has_inactive;
    return is_wrong ? "x_active_mask must select all tokens if ranks have different numbers of tokens" : "";
}

Fused dispatch(const Dispatch& c) {
    Fused made{check_distribution(c.d), collective_of(c.row_type(), c.d.hidden, false)};
    check(c);
    set_bytes(made.collective, Sent::most_bytes(c));
    require_agreement(made.collective, agreed(c));
    made.collective.mismatch = [c](const Turn& turn) { return mismatch(c, turn); };
    made.collective.put = [c](char* slot) { send(c, slot); };
    made.collective.take = [c](const Turn& turn) { receive(c, turn); };
    return made;
}

Fused MoeDistributeDispatchV4(In x, In ids, In scales, In mask, In weights, In elastic, In performance, Text group,
                              int64_t ranks, int64_t rank, int64_t experts, Text, int64_t tp_ranks, int64_t,
                              int64_t shard_type, int64_t shared_experts, int64_t shared_ranks, int64_t quant_mode,
                              int64_t global_tokens, int64_t counts_type, Text algorithm, int64_t zero, int64_t copies,
                              int64_t constant, Out rows, Out row_scales, Out assist, Out expert_counts,
                              Out rank_counts, Out, Out row_weights) {
    require_absent(elastic, "elastic_info");
    require_absent(performance, "performance_info");
    auto d = distribution_of(true, false, group, ranks, rank, experts, tp_ranks, shard_type, shared_experts,
                             shared_ranks, global_tokens, x, ids);
    d.algorithm = algorithm;
    d.special_experts = zero + copies + constant;
    return dispatch({d, x, ids, scales, mask, weights, quant_mode, counts_type, rows, row_scales, assist, expert_counts,
                     rank_counts, row_weights});
}

Fused MoeDistributeDispatchV3(In x, In ids, In scales, In mask, In weights, In elastic, Text group, int64_t ranks,
                              int64_t rank, int64_t experts, Text group_tp, int64_t tp_ranks, int64_t tp_rank,
                              int64_t shard_type, int64_t shared_experts, int64_t shared_ranks, int64_t quant_mode,
                              int64_t global_tokens, int64_t counts_type, Text algorithm, int64_t zero, int64_t copies,
                              int64_t constant, Out rows, Out row_scales, Out assist, Out expert_counts,
                              Out rank_counts, Out tp_counts, Out row_weights) {
    return MoeDistributeDispatchV4(x, ids, scales, mask, weights, elastic, nullptr, group, ranks, rank, experts,
                                   group_tp, tp_ranks, tp_rank, shard_type, shared_experts, shared_ranks, quant_mode,
                                   global_tokens, counts_type, algorithm, zero, copies, constant, rows, row_scales,
                                   assist, expert_counts, rank_counts, tp_counts, row_weights);
}

Fused MoeDistributeDispatchV2(In x, In ids, In scales, In mask, In weights, Text group, int64_t ranks, int64_t rank,
                              int64_t experts, Text group_tp, int64_t tp_ranks, int64_t tp_rank, int64_t shard_type,
                              int64_t shared_experts, int64_t shared_ranks, int64_t quant_mode, int64_t global_tokens,
                              int64_t counts_type, Text algorithm, Out rows, Out row_scales, Out assist,
                              Out expert_counts, Out rank_counts, Out tp_counts, Out row_weights) {
    return MoeDistributeDispatchV4(x, ids, scales, mask, weights, nullptr, nullptr, group, ranks, rank, experts,
                                   group_tp, tp_ranks, tp_rank, shard_type, shared_experts, shared_ranks, quant_mode,
                                   global_tokens, counts_type, algorithm, 0, 0, 0, rows, row_scales, assist,
                                   expert_counts, rank_counts, tp_counts, row_weights);
}

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_distribute_dispatch.md");
Fused MoeDistributeDispatch(In x, In ids, In scales, In mask, In weights, Text group, int64_t ranks, int64_t rank,
                            int64_t experts, Text, int64_t tp_ranks, int64_t, int64_t shard_type,
                            int64_t shared_experts, int64_t shared_ranks, int64_t quant_mode, int64_t global_tokens,
                            int64_t counts_type, Out rows, Out row_scales, Out places, Out expert_counts,
                            Out rank_counts, Out, Out row_weights) {
    require_tiling(!is_given(mask), "x_active_mask is reserved");
    auto d = distribution_of(true, true, group, ranks, rank, experts, tp_ranks, shard_type, shared_experts,
                             shared_ranks, global_tokens, x, ids);
    return dispatch({d, x, ids, scales, nullptr, weights, quant_mode, counts_type, rows, row_scales, places,
                     expert_counts, rank_counts, row_weights});
}

}  // namespace

ACLNN(MoeDistributeDispatchV4, .workspace = kFusedWorkspace)
ACLNN(MoeDistributeDispatchV3, .workspace = kFusedWorkspace)
ACLNN(MoeDistributeDispatchV2, .workspace = kFusedWorkspace)
ACLNN(MoeDistributeDispatch, .workspace = kFusedWorkspace)
