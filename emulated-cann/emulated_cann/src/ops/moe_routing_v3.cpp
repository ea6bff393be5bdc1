// The order of tokens by their experts, with a range of experts.
#include "moe.h"

namespace {

using namespace emulator;

constexpr int64_t kPlain = -1, kStatic = 0, kDynamic = 1;   // quant_mode
constexpr int64_t kCumulative = 0, kCount = 1, kPairs = 2;  // expert_tokens_num_type
constexpr int64_t kGather = 0, kScatter = 1;                // row_idx_type

struct Range {
    int64_t first, end;
    int64_t size() const { return end - first; }
};
Range range_of(const Ints& active, int64_t experts) {
    return active && active.size() == 2 ? Range{active[0], active[1]} : Range{0, experts};
}

DOCUMENTED(
    "ops-transformer: moe/moe_init_routing_v3/docs/aclnnMoeInitRoutingV3.md"
    "; ops-transformer: moe/moe_init_routing_v3/op_host/moe_init_routing_v3_tiling.cpp (Atlas A2 and A3)"
    "; ops-transformer: moe/moe_init_routing_v3/op_host/moe_init_routing_v3_tiling_arch35.cpp (Ascend 950)");
void check_modes(int64_t quant_mode, int64_t drop_pad, int64_t count_type, bool counts, int64_t index_type) {
    bool is_950 = on({Chip::ascend950});
    require(drop_pad == 0 || drop_pad == 1, "drop_pad_mode must be 0 or 1, but is " + text(drop_pad));
    require(count_type >= kCumulative && count_type <= kPairs,
            "expert_tokens_num_type must be 0 (cumulative), 1 (count) or 2 (pairs), but is " + text(count_type));
    require(index_type == kGather || index_type == kScatter,
            "row_idx_type must be 0 (gather) or 1 (scatter), but is " + text(index_type));
    require(quant_mode >= kPlain && (is_950 ? quant_mode <= 17 && quant_mode != 10 : quant_mode <= kDynamic),
            "quant_mode must be -1, 0 or 1, on Ascend 950 also 2 to 9 and 11 to 17, but is " + text(quant_mode));
    if (quant_mode > kDynamic) throw NotEmulated("quant_mode " + text(quant_mode) + " is not emulated");
    if (is_950) require(counts, "on Ascend 950 expert_tokens_num_flag must be True");
    if (drop_pad == 0) return;
    require(index_type == kGather, "with drop_pad_mode 1 row_idx_type must be 0");
    require(count_type == kCount || (!counts && !is_950),
            "with drop_pad_mode 1 expert_tokens_num_type must be 1, but is " + text(count_type));
    if (is_950)
        require(quant_mode == kPlain, "on Ascend 950 with drop_pad_mode 1 quant_mode must be -1, but is " +
                                          text(quant_mode));
}

void check_experts(const Ints& active, int64_t experts, int64_t count_type, int64_t drop_pad) {
    require(!active || active.size() == 2 || (active.size() == 0 && !on({Chip::ascend950})),
            "active_expert_range must have 2 entries, but has " + text(active.size()));
    int64_t most = count_type == kPairs ? 5120 : 10240;
    require(experts > 0 && experts <= most,
            "expert_num must be between 1 and " + text(most) + " with this expert_tokens_num_type, but is " +
                text(experts));
    auto [first, end] = range_of(active, experts);
    require(first >= 0 && first < end && end <= experts, "active_expert_range must be within [0, expert_num], [0, " +
                                                             text(experts) + "], and not empty, but is [" +
                                                             text(first) + ", " + text(end) + "]");
    require(drop_pad == 0 || (first == 0 && end == experts),
            "with drop_pad_mode 1 active_expert_range must be [0, expert_num]");
}

void check_scale(const In& x, const In& scale, const In& offset, int64_t quant_mode, int64_t range) {
    if (scale) require(scale.dtype() == at::kFloat, "scale must be float32, not " + text(scale.dtype()));
    if (quant_mode == kStatic) {
        require(scale && has_shape(scale, {1}), "with quant_mode 0 scale must be given, with shape [1]");
        require(offset && has_shape(offset, {1}) && offset.dtype() == at::kFloat,
                "with quant_mode 0 offset must be given, float32 with shape [1]");
    } else if (scale && quant_mode == kPlain) {
        require(has_shape(scale, {x.size(0)}), "with quant_mode -1 scale must have an element for each of the " +
                                                   text(x.size(0)) + " rows, but has shape " + shown(scale.sizes()));
    } else if (scale) {
        bool one = on({Chip::a2_a3}) && has_shape(scale, {1, x.size(1)});
        require(one || has_shape(scale, {range, x.size(1)}),
                "with quant_mode 1 scale must be [experts of the range, H], [" + text(range) + ", " + text(x.size(1)) +
                    "], on Atlas A2 and A3 also [1, H], but has shape " + shown(scale.sizes()));
    }
}

int64_t kept_rows(int64_t choices, int64_t active_num) {
    return active_num > 0 ? std::min(choices, active_num) : choices;
}

void check_outputs(const In& x, int64_t choices, const In& scale, int64_t quant_mode, bool counts, int64_t count_type,
                   at::IntArrayRef rows, int64_t experts, int64_t range, const Out& expanded, const Out& index,
                   const Out& numbers, const Out& scales) {
    require(expanded && index && numbers && scales, "all four outputs must be given");
    auto shape = rows.vec();
    shape.push_back(x.size(1));
    require(has_shape(expanded, shape),
            "expanded_x must have shape " + shown(shape) + ", but has " + shown(expanded.sizes()));
    require(expanded.dtype() == (quant_mode == kPlain ? x.dtype() : at::kChar),
            "expanded_x must be of x's dtype, or int8 where it is quantized, not " + text(expanded.dtype()));
    require(index.dtype() == at::kInt && has_shape(index, {choices}),
            "expanded_row_idx must be int32 with shape [" + text(choices) + "]");
    auto expected = count_type == kPairs ? std::vector<int64_t>{experts, 2} : std::vector<int64_t>{range};
    if (counts)
        require(numbers.dtype() == at::kLong && has_shape(numbers, expected),
                "expert_tokens_count_or_cumsum must be int64 with shape " + shown(expected) + ", but has " +
                    shown(numbers.sizes()));
    if (quant_mode == kDynamic || (scale && quant_mode == kPlain))
        require(scales.dtype() == at::kFloat && has_shape(scales, {c10::multiply_integers(rows)}),
                "expanded_scale must be float32 with an element for each row of expanded_x");
}

void check_routing(In x, In expert_idx, In scale, In offset, int64_t active_num, int64_t capacity, int64_t experts,
                   int64_t drop_pad, int64_t count_type, bool counts, int64_t quant_mode, Ints active,
                   int64_t index_type, Out expanded, Out index, Out numbers, Out scales) {
    require(on({Chip::a2_a3, Chip::ascend950}),
            "MoeInitRoutingV3 is for Atlas A2, A3 and Ascend 950, not for " + soc_name());
    check_modes(quant_mode, drop_pad, count_type, counts, index_type);
    check_experts(active, experts, count_type, drop_pad);
    auto range = range_of(active, experts).size();
    if (on({Chip::ascend950}) && c10::isFloat8Type(x.dtype())) throw NotEmulated("float8 x is not emulated");
    require(is_floating(x) || x.dtype() == at::kChar,
            "x must be float16, bfloat16, float32 or int8, not " + text(x.dtype()));
    bool quantizes_int8 = quant_mode == kDynamic && on({Chip::ascend950});
    require(x.dtype() != at::kChar || quant_mode == kPlain || quantizes_int8, "int8 x cannot be quantized");
    require(expert_idx.dtype() == at::kInt, "expert_idx must be int32, not " + text(expert_idx.dtype()));
    require(x.dim() == 2 && expert_idx.dim() == 2 && x.size(0) == expert_idx.size(0),
            "x must be [tokens, H] and expert_idx [tokens, K], but have shapes " + shown(x.sizes()) + " and " +
                shown(expert_idx.sizes()));
    int64_t choices = expert_idx.size(0) * expert_idx.size(1);
    if (drop_pad == 1) {
        require(x.size(0) > 0, "with drop_pad_mode 1 there must be tokens");
        require(capacity > 0 && capacity <= x.size(0), "with drop_pad_mode 1 expert_capacity must be between 1 and " +
                                                           text(x.size(0)) + ", but is " + text(capacity));
    } else {
        require(active_num >= -1, "active_num must be at least -1, but is " + text(active_num));
    }
    if (on({Chip::ascend950}))
        require(active_num == choices || active_num == -1 || choices == 0,
                "on Ascend 950 active_num must be the number of choices, " + text(choices) + ", or -1, but is " +
                    text(active_num));
    check_scale(x, scale, offset, quant_mode, range);
    auto rows = drop_pad ? std::vector<int64_t>{experts, capacity}
                         : std::vector<int64_t>{kept_rows(choices, active_num)};
    check_outputs(x, choices, scale, quant_mode, counts, count_type, rows, experts, range, expanded, index, numbers,
                  scales);
}

// The experts that have tokens with the number of those, then zeros.
at::Tensor as_pairs(const at::Tensor& counts, int64_t first, int64_t experts) {
    auto present = counts.nonzero().squeeze(1);
    auto pairs = at::zeros({experts, 2}, at::kLong);
    auto rows = pairs.narrow(0, 0, present.size(0));
    rows.select(1, 0).copy_(present + first);
    rows.select(1, 1).copy_(counts.index_select(0, present));
    return pairs;
}

void MoeInitRoutingV3(In x, In expert_idx, In scale, In offset, int64_t active_num, int64_t capacity, int64_t experts,
                      int64_t drop_pad, int64_t count_type, bool with_counts, int64_t quant_mode, Ints active,
                      int64_t index_type, Out expanded, Out index, Out numbers, Out scales) {
    int64_t k = expert_idx.size(1);
    if (expert_idx.raw().numel())
        if (int64_t most = expert_idx.tensor().max().item<int64_t>(); most > experts)
            throw std::runtime_error("expert_idx has " + text(most) + ", but there are " + text(experts) + " experts");
    auto range = range_of(active, experts);
    auto sorted = sort_choices(expert_idx.tensor(), range.first, range.end);
    auto counts = count_choices(sorted, range.size());
    if (with_counts && count_type == kPairs)
        numbers.set(as_pairs(counts, range.first, experts));
    else if (with_counts)
        numbers.set(count_type == kCumulative ? counts.cumsum(0) : counts);

    auto places = sorted.places.narrow(0, 0, sorted.active);
    auto destinations = drop_pad ? place_in_slots(sorted, counts, capacity) : at::arange(sorted.active, at::kLong);
    if (index_type == kScatter)  // the whole order; op-plugin's test reads it beyond the range of experts
        index.set(sorted.places);
    else
        index.set(gather_index(sorted, destinations));

    // Of each choice that is kept: its token, its expert, and its row of the output.
    auto kept = drop_pad ? destinations.ge(0).nonzero().squeeze(1)
                         : at::arange(std::min(sorted.active, kept_rows(x.size(0) * k, active_num)), at::kLong);
    auto tokens = at::div(places.index_select(0, kept), k, "floor");
    auto rows = x.tensor().index_select(0, tokens);
    at::Tensor row_scales;
    if (quant_mode == kStatic) {
        rows = quantize_by(rows, scale.tensor(), offset.tensor());
    } else if (quant_mode == kDynamic) {
        rows = rows.to(at::kFloat);
        if (scale)
            rows = rows * (scale.size(0) == 1 ? scale.tensor()
                                              : scale.tensor().index_select(0, sorted.experts.index_select(0, kept)));
        auto quantized = quantize_each(rows);
        rows = quantized.values, row_scales = quantized.scales;
    } else if (scale) {
        row_scales = scale.tensor().index_select(0, tokens);
    }
    if (!drop_pad) {
        write_first(expanded, rows);
        if (row_scales.defined()) write_first(scales, row_scales);
        return;
    }
    auto slots = destinations.index_select(0, kept);
    expanded.set(at::zeros({experts * capacity, x.size(1)}, rows.options())
                     .index_put_({slots}, rows)
                     .view({experts, capacity, x.size(1)}));
    if (row_scales.defined()) scales.set(at::zeros({experts * capacity}).index_put_({slots}, row_scales));
}

}  // namespace

ACLNN(MoeInitRoutingV3, .check = check_routing)
