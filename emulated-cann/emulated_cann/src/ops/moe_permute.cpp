// Tokens brought into the order of their experts and back, without a count for each expert, or after a transfer.
#include "moe.h"

namespace {

using namespace emulator;

constexpr int64_t kMostIndices = 16777215, kMostOfInt8 = 10240;

DOCUMENTED("ops-transformer: moe/moe_token_permute/docs/aclnnMoeTokenPermute.md");
void check_permute(In tokens, In indices, int64_t kept, bool padded, Out permuted, Out sorted) {
    require(on({Chip::a2_a3, Chip::ascend950}),
            "MoeTokenPermute is for Atlas A2, A3 and Ascend 950, not for " + soc_name());
    bool int8 = tokens.dtype() == at::kChar;
    require(is_floating(tokens) || (int8 && on({Chip::ascend950})),
            "tokens must be float16, bfloat16 or float32, on Ascend 950 also int8, not " + text(tokens.dtype()));
    require(tokens.dim() >= 2, "tokens must have at least 2 dimensions, but has " + text(tokens.dim()));
    require(is_any(indices, {at::kInt, at::kLong}), "indices must be int32 or int64, not " + text(indices.dtype()));
    require((indices.dim() == 1 || indices.dim() == 2) && indices.size(0) == tokens.size(0),
            "indices must be [tokens] or [tokens, K], but has shape " + shown(indices.sizes()) + " for " +
                text(tokens.size(0)) + " tokens");
    require(!padded, "padded_mode must be False");
    int64_t choices = c10::multiply_integers(indices.sizes());
    require(choices < kMostIndices, "indices must have fewer than 16777215 elements, but has " + text(choices));
    require(!int8 || (choices <= kMostOfInt8 && kept <= kMostOfInt8),
            "with int8 tokens there may be at most 10240 indices and num_out_tokens");
    int64_t rows = kept > 0 ? std::min(choices, kept) : std::max<int64_t>(choices + kept, 0);
    require(permuted.dtype() == tokens.dtype(), "permuted_tokens must be of tokens' dtype, " + text(tokens.dtype()));
    require(permuted.dim() >= 2 && permuted.size(0) == rows &&
                c10::multiply_integers(permuted.sizes().slice(1)) == c10::multiply_integers(tokens.sizes().slice(1)),
            "permuted_tokens must have " + text(rows) + " rows as long as those of tokens, but has shape " +
                shown(permuted.sizes()));
    require(sorted.dtype() == at::kInt && has_shape(sorted, {choices}),
            "sorted_indices must be int32 with an element for each index");
}

void MoeTokenPermute(In tokens, In indices, int64_t, bool, Out permuted, Out sorted) {
    auto experts = indices.tensor();
    if (experts.numel() == 0) return;
    if (experts.min().item<int64_t>() < 0 || experts.max().item<int64_t>() >= kMostIndices)
        throw std::runtime_error("indices must be between 0 and 16777214");
    int64_t k = experts.dim() == 2 ? experts.size(1) : 1;
    auto order = sort_choices(experts, 0, kMostIndices);
    sorted.set(gather_index(order, at::arange(order.active, at::kLong)));
    auto rows = at::div(order.places.narrow(0, 0, permuted.size(0)), k, "floor");
    permuted.set(tokens.tensor().index_select(0, rows).reshape(permuted.sizes()));
}

DOCUMENTED(
    "ops-transformer: moe/moe_token_unpermute/docs/aclnnMoeTokenUnpermute.md"
    "; ops-transformer: moe/moe_token_unpermute/op_host/moe_token_unpermute_tiling.cpp");
void check_unpermute(In permuted, In sorted, In probs, bool padded, Ints, Out out) {
    require(on({Chip::a2_a3, Chip::ascend310p, Chip::ascend950}),
            "MoeTokenUnpermute is for Atlas A2, A3, Ascend 310P and 950, not for " + soc_name());
    require(is_floating(permuted),
            "permuted_tokens must be float16, bfloat16 or float32, not " + text(permuted.dtype()));
    require(permuted.dim() == 2, "permuted_tokens must be [rows, H], but has shape " + shown(permuted.sizes()));
    require(sorted.dtype() == at::kInt && sorted.dim() == 1,
            "sorted_indices must be int32 of 1 dimension, not " + text(sorted.dtype()) + " " + shown(sorted.sizes()));
    require(!padded, "padded_mode must be False");
    int64_t k = 1;
    if (probs) {
        require(is_floating(probs), "probs must be float16, bfloat16 or float32, not " + text(probs.dtype()));
        require(probs.dim() == 2, "probs must be [tokens, K], but has shape " + shown(probs.sizes()));
        require(sorted.size(0) == probs.size(0) * probs.size(1),
                "sorted_indices must have as many elements as probs, " + text(probs.size(0) * probs.size(1)) +
                    ", but has " + text(sorted.size(0)));
        k = probs.size(1);
        require(k <= 512 || on({Chip::ascend950}), "K must be at most 512, but is " + text(k));
    }
    int64_t tokens = probs ? probs.size(0) : sorted.size(0);
    require(out.dtype() == permuted.dtype() && has_shape(out, {tokens, permuted.size(1)}),
            "the output must be [tokens, H] of permuted_tokens' dtype");
    if (!on({Chip::ascend310p})) return;
    require(permuted.dtype() != at::kBFloat16 && (!probs || probs.dtype() != at::kBFloat16),
            "on Ascend 310P permuted_tokens and probs must be float16 or float32");
    require(permuted.size(1) % 128 == 0 && permuted.size(1) <= 10240,
            "on Ascend 310P H must be a multiple of 128 and at most 10240, but is " + text(permuted.size(1)));
}

// Rows beyond the permuted tokens were dropped. On all but Ascend 950 a row whose probability is zero is not read.
void MoeTokenUnpermute(In permuted, In sorted, In probs, bool, Ints, Out out) {
    auto rows = permuted.tensor();
    auto places = sorted.tensor().to(at::kLong);
    if (places.numel() == 0) return;
    int64_t least = places.min().item<int64_t>(), most = places.max().item<int64_t>();
    UNDEFINED("the documents allow no such index, and a kernel would read other memory");
    if (least < 0 || (on({Chip::ascend950}) && most >= rows.size(0)))
        throw std::runtime_error("sorted_indices has " + text(least) + " to " + text(most) +
                                 ", but permuted_tokens has " + text(rows.size(0)) + " rows");
    int64_t k = probs ? probs.size(1) : 1;
    auto by_choice = places.view({-1, k});
    auto sum = at::zeros(out.sizes(), at::kFloat);
    for (int64_t choice = 0; choice < k; ++choice) {
        auto place = by_choice.select(1, choice);
        auto read = place.lt(rows.size(0));
        auto factor = probs ? probs.tensor().select(1, choice).to(at::kFloat) : at::ones({place.size(0)});
        if (!on({Chip::ascend950})) read = read.logical_and_(factor.ne(0));
        auto which = read.nonzero().squeeze(1);
        sum.index_add_(0, which, rows.index_select(0, place.index_select(0, which)).to(at::kFloat) *
                                     factor.index_select(0, which).unsqueeze(1));
    }
    out.set(sum);
}

DOCUMENTED("ops-transformer: moe/moe_re_routing/README.md");
void check_re_routing(In tokens, In counts, In scales, int64_t count_type, int64_t index_type, Out permuted,
                      Out permuted_scales, Out index, Out totals) {
    require(on({Chip::a2_a3, Chip::ascend950}),
            "MoeReRouting is for Atlas A2, A3 and Ascend 950, not for " + soc_name());
    require(tokens.dim() == 2 && tokens.size(1) > 0 && tokens.size(1) < 16384,
            "tokens must be [A, H] with H below 16384, but has shape " + shown(tokens.sizes()));
    if (on({Chip::ascend950}) && c10::isFloat8Type(tokens.dtype())) throw NotEmulated("float8 tokens are not emulated");
    require(is_any(tokens, {at::kHalf, at::kBFloat16, at::kChar}),
            "tokens must be float16, bfloat16 or int8, not " + text(tokens.dtype()));
    require(is_any(counts, {at::kInt, at::kLong}) && counts.dim() == 2,
            "expert_token_num_per_rank must be int32 or int64 [ranks, experts], not " + text(counts.dtype()) + " " +
                shown(counts.sizes()));
    if (scales)
        require(scales.dtype() == at::kFloat && has_shape(scales, {tokens.size(0)}),
                "per_token_scales must be float32 [A], not " + text(scales.dtype()) + " " + shown(scales.sizes()));
    require(count_type == 1, "expert_token_num_type must be 1, but is " + text(count_type));
    require(index_type == 0 || (index_type == 1 && on({Chip::ascend950})),
            "idx_type must be 0, on Ascend 950 0 or 1, but is " + text(index_type));
    require(permuted.dtype() == tokens.dtype() && has_shape(permuted, tokens.sizes()),
            "permute_tokens must have the shape and dtype of tokens");
    require(!scales || (permuted_scales.dtype() == at::kFloat && has_shape(permuted_scales, scales.sizes())),
            "permute_per_token_scales must have the shape and dtype of per_token_scales");
    require(index.dtype() == at::kInt && has_shape(index, {tokens.size(0)}), "permute_token_idx must be int32 [A]");
    require(totals.dtype() == counts.dtype() && has_shape(totals, {counts.size(1)}),
            "expert_token_num must be [experts] of the dtype of expert_token_num_per_rank");
}

// Tokens lie by rank and then by expert, and are brought to lie by expert and then by rank.
void MoeReRouting(In tokens, In counts, In scales, int64_t, int64_t index_type, Out permuted, Out permuted_scales,
                  Out index, Out totals) {
    auto by_rank = counts.tensor().to(at::kLong);
    if (by_rank.lt(0).any().item<bool>() || by_rank.sum().item<int64_t>() != tokens.size(0))
        throw std::runtime_error("expert_token_num_per_rank must add up to the " + text(tokens.size(0)) + " tokens");
    int64_t ranks = by_rank.size(0), experts = by_rank.size(1);
    auto expert_of_block = at::arange(experts, at::kLong).expand({ranks, experts}).reshape(-1);
    auto expert = at::repeat_interleave(expert_of_block, by_rank.reshape(-1));
    auto source = std::get<1>(at::sort(expert, /*stable=*/true, 0, false));
    permuted.set(tokens.tensor().index_select(0, source));
    if (scales) permuted_scales.set(scales.tensor().index_select(0, source));
    index.set(index_type == 0 ? source : at::argsort(source));
    totals.set(by_rank.sum(0));
}

}  // namespace

ACLNN(MoeTokenPermute, .check = check_permute)
ACLNN(MoeTokenUnpermute, .check = check_unpermute)
ACLNN(MoeReRouting, .check = check_re_routing)
