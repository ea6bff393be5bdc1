#include "attention_plan.h"

#include "attention_core.h"
#include "grouped.h"

namespace emulator {

namespace {


DOCUMENTED(
    "ops-transformer: attention/fused_infer_attention_score/docs/aclnnFusedInferAttentionScoreV4.md"
    "; ops-transformer: attention/incre_flash_attention/docs/aclnnIncreFlashAttentionV4.md"
    "; ops-transformer: attention/prompt_flash_attention/docs/aclnnPromptFlashAttentionV3.md");
void check_tensors(const InferAttention& request) {
    for (auto& [name, given] : request.unsupported)
        if (given) throw NotEmulated(std::string(name) + " is not emulated");
    require(bool(request.query) && request.key.size() > 0 && request.value.size() == request.key.size(),
            "query, key and value are required, and key and value must have the same number of tensors");
    auto dtype = request.query.dtype();
    require(dtype == at::kHalf || dtype == at::kBFloat16,
            std::string("query must be float16 or bfloat16, not ") + c10::toString(dtype));
    require(request.query.raw().is_contiguous(), "query must be contiguous");
    for (size_t i = 0; i < request.key.size(); ++i) {
        const auto &key = request.key[i], &value = request.value[i];
        require(key.raw().is_contiguous() && value.raw().is_contiguous(), "key and value must be contiguous");
        const auto wanted = request.key_scale ? at::kChar : dtype;
        require(key.dtype() == wanted && value.dtype() == wanted,
                std::string("key and value must have the query's dtype, or int8 with key_antiquant_scale, ") +
                    c10::toString(wanted) + ", but are " + c10::toString(key.dtype()) + " and " +
                    c10::toString(value.dtype()));
        require(key.dim() == value.dim(), "key and value must have the same number of dimensions, but have " +
                                              number(key.dim()) + " and " + number(value.dim()));
    }
    if (request.bias) {
        require(request.bias.dtype() == dtype,
                "pse_shift must have the query's dtype, " + c10::str(dtype, ", not ", request.bias.dtype()));
        require(request.bias.dim() == 4 && request.bias.size(1) == request.heads,
                "pse_shift must have shape [B or 1, N, Q_S, KV_S], not " + c10::str(request.bias.sizes()));
    }
}

DOCUMENTED(
    "op-plugin: docs/context/torch_npu-npu_fused_infer_attention_score_v2.md (learnable_sink)"
    "; ops-transformer: attention/fused_infer_attention_score/op_host/fused_infer_attention_score_tiling.cpp "
    "(isLearnableSink)");
void check_sink(const InferAttention& request, int64_t heads, int64_t dim) {
    require(request.sink.dtype() == at::kBFloat16,
            std::string("learnable_sink must be bfloat16, not ") + c10::toString(request.sink.dtype()));
    require(request.sink.dim() == 1 && request.sink.size(0) == heads,
            "learnable_sink must have shape [num_heads], not " + c10::str(request.sink.sizes()));
    require(request.layout == "TND" || request.layout == "NTD_TND",
            "learnable_sink requires input_layout TND or NTD_TND, not " + request.layout);
    require(dim == 64 || dim == 128,
            "learnable_sink requires the head dimension 64 or 128, but it is " + number(dim));
    require(!request.bias, "learnable_sink does not support pse_shift");
}

DOCUMENTED(
    "ops-transformer: attention/fused_infer_attention_score/docs/aclnnFusedInferAttentionScoreV4.md"
    "; ops-transformer: attention/incre_flash_attention/docs/aclnnIncreFlashAttentionV4.md"
    "; ops-transformer: attention/prompt_flash_attention/docs/aclnnPromptFlashAttentionV3.md");
void check_heads(int64_t heads, int64_t kv_heads, int64_t dim, bool latent) {
    require(heads > 0 && heads <= 256, "num_heads must be between 1 and 256, but is " + number(heads));
    require(kv_heads > 0 && heads % kv_heads == 0,
            "num_heads, " + number(heads) + ", must be a multiple of num_key_value_heads, " + number(kv_heads));
    // From CANN 9 on, the limit does not apply to head dimensions 64 and 128.
    bool any_group = latent || (cann_release() >= 900 && (dim == 64 || dim == 128));
    require(heads / kv_heads <= 64 || any_group,
            "num_heads / num_key_value_heads must be at most 64 for head dimension " + number(dim) +
                " in this release of CANN, but is " + number(heads / kv_heads));
    require(dim > 0 && dim <= 512 && dim % 16 == 0,
            "the head dimension must be a multiple of 16 and at most 512, but is " + number(dim));
}

constexpr int64_t kMaxPackedDim = 256;

// Returns whether the call goes to CANN 9's kernel for packed sequences, which takes any head dimension up to 256. See
// ops-transformer, branches 9.0.0 and 9.1.0, fused_infer_attention_score_tiling.cpp, IsUsingFAI.
bool takes_any_head_dim(const InferAttention& request, int64_t heads, int64_t kv_heads) {
    bool half = request.query.dtype() == at::kHalf, paged = bool(request.block_table);
    if (request.layout != "TND" || (request.sparse_mode != 0 && request.sparse_mode < 3)) return false;
    if (heads == kv_heads ? !half && request.inner_precise == 1 : request.inner_precise != 0) return false;
    if (!paged) return true;
    auto dims = request.key[0].dim();
    return (dims == 3 || (dims == 5 && cann_release() >= 901)) && request.block_size <= 512;
}

// The limits of TND, TND_NTD and NTD_TND on Atlas A2 and A3, from aclnnFusedInferAttentionScoreV3.md and V4.md of
// ops-transformer: branch 8.5.0 (bfloat16 only) and branches 9.0.0 and 9.1.0 (also float16). The op_host of
// branch 8.5.0 also takes head dimension 64.
void check_packed(const InferAttention& request, int64_t heads, int64_t kv_heads, int64_t dim) {
    if (cann_release() < 900) {
        require(request.query.dtype() == at::kBFloat16,
                std::string("a query in a TND layout must be bfloat16 before CANN 9, not ") +
                    c10::toString(request.query.dtype()));
        require(dim == 64 || dim == 128 || (dim == 192 && heads == kv_heads),
                "the head dimension in a TND layout must be 64 or 128 before CANN 9, or 192 if num_heads equals "
                "num_key_value_heads, but is " +
                    number(dim));
        return;
    }
    if (takes_any_head_dim(request, heads, kv_heads)) {
        require(dim <= kMaxPackedDim, "the head dimension in TND must be at most 256, but is " + number(dim));
        return;
    }
    require(dim == 64 || dim == 128 || (dim == 192 && request.layout == "TND"),
            "the head dimension in a TND layout must be 64 or 128, or 192 in TND, but is " + number(dim) +
                "; TND takes up to 256 with sparse_mode 0, 3 or 4, inner_precise 0 and caches of shape [blocks, "
                "block_size, H] with block_size at most 512");
}

DOCUMENTED(
    "op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_fused_infer_attention_score.md (MLA)"
    "; ops-transformer: attention/fused_infer_attention_score/docs/aclnnFusedInferAttentionScoreV4.md (query d=512)");
void check_rotary_part(const In& rope, const In& of, const AttentionLayout& layout, int64_t heads, const char* name,
                       bool paged) {
    require(rope.dtype() == of.dtype() && rope.raw().is_contiguous(),
            std::string(name) + " must be contiguous, and have the dtype of what it belongs to");
    auto shape = of.sizes().vec();
    bool joined = paged ? of.dim() == 3 : layout.input == "BSH";
    if (of.dim() == 5)
        shape[2] = kRopeDim / shape[4];
    else
        shape.back() = joined ? heads * kRopeDim : kRopeDim;
    require(rope.sizes() == at::IntArrayRef(shape),
            std::string(name) + " must have shape " + c10::str(at::IntArrayRef(shape), ", not ", rope.sizes()));
}

DOCUMENTED(
    "ops-transformer: attention/fused_infer_attention_score/docs/aclnnFusedInferAttentionScoreV3.md (query d=512)"
    "; ops-transformer: attention/fused_infer_attention_score/docs/aclnnFusedInferAttentionScoreV4.md (query d=512)");
// V4 has no limit for A2 and A3.
void check_latent_queries(const InferAttention& request, const std::vector<Span>& queries) {
    if (!request.first_version && product_line("FusedInferAttentionScore") != Line::a5) return;
    for (const auto& each : queries)
        require(each.length <= kMostLatentQueries,
                "a sequence must have at most 16 queries of 512 elements with query_rope, in the first version of the "
                "operator or on 950, but has " +
                    number(each.length));
}

// Latent attention: a rotary part of queries and keys, beside them. Queries of 512 elements are projected to the latent.
void check_rope(const InferAttention& request, const AttentionLayout& layout, int64_t heads, int64_t kv_heads,
                int64_t dim) {
    require(request.query_rope && request.key_rope, "query_rope and key_rope must be given together");
    require(dim == kLatentDim || dim == kPlainDim,
            "the head dimension with query_rope must be 512 or 128, but is " + number(dim));
    require(!request.bias && !request.sink && !request.key_scale && request.key.size() == 1,
            "query_rope takes no pse_shift, learnable_sink, antiquant scales or lists of tensors");
    bool paged = bool(request.block_table);
    check_rotary_part(request.query_rope, request.query, layout, heads, "query_rope", false);
    check_rotary_part(request.key_rope, request.key[0], layout, kv_heads, "key_rope", paged);
    if (dim == kPlainDim) {
        require(!paged, "query_rope with the head dimension 128 takes no block_table");
        for (auto* each : {"BSH", "BSND", "TND", "BNSD", "NTD", "BSH_BNSD", "BSND_BNSD", "BNSD_BSND", "NTD_TND"})
            if (request.layout == each) return;
        throw Refused("query_rope with the head dimension 128 takes no input_layout " + request.layout);
    }
    require(heads <= 128 && (heads & (heads - 1)) == 0,
            "num_heads with query_rope must be 1, 2, 4, 8, 16, 32, 64 or 128, but is " + number(heads));
    require(kv_heads == 1, "num_key_value_heads with query_rope must be 1, but is " + number(kv_heads));
    require(!request.want_lse, "query_rope with the head dimension 512 takes no softmax_lse_flag");
    require(request.sparse_mode == 0 || request.sparse_mode == 3 || request.sparse_mode == 4,
            "sparse_mode with query_rope must be 0, 3 or 4, but is " + number(request.sparse_mode));
    for (auto* each : {"BSH", "BSND", "BNSD", "BNSD_NBSD", "BSND_NBSD", "BSH_NBSD", "TND", "TND_NTD"})
        if (request.layout == each) return;
    throw Refused("input_layout with query_rope must be BSH, BSND, BNSD, TND or one with an output of N first, not " +
                  request.layout);
}

DOCUMENTED(
    "ops-transformer: attention/fused_infer_attention_score/docs/aclnnFusedInferAttentionScoreV4.md"
    "; ops-transformer: attention/incre_flash_attention/docs/aclnnIncreFlashAttentionV4.md"
    "; ops-transformer: attention/prompt_flash_attention/docs/aclnnPromptFlashAttentionV3.md");
void check_block_size(const InferAttention& request, const AttentionPlan& plan, int64_t in_cache) {
    int64_t size = request.block_size;
    std::string found = ", but is " + number(size);
    require(size == in_cache, "block_size must be that of the cache, " + number(in_cache) + ", but is " + number(size));
    if (plan.layout.packed || request.query_rope)
        require(size > 0 && size % 16 == 0 && size <= 1024,
                "block_size in a TND layout, or with query_rope, must be a multiple of 16 and at most 1024" + found);
    else if (plan.decode)
        require(size > 0 && size % 16 == 0 && size <= 512,
                "block_size must be a multiple of 16 and at most 512" + found);
    else
        require(size >= 128 && size % 128 == 0 && size <= 512,
                "block_size must be 128, 256, 384 or 512 for more than one query per sequence" + found);
}

void check_paging(const InferAttention& request, const AttentionPlan& plan, int64_t dim) {
    const auto& table = request.block_table;
    require(table.dtype() == at::kInt, std::string("block_table must be int32, not ") + c10::toString(table.dtype()));
    require(table.dim() == 2 && table.size(0) == plan.batch && table.raw().is_contiguous(),
            "block_table must be contiguous and have shape [" + number(plan.batch) + ", blocks of a sequence], not " +
                c10::str(table.sizes()));
    require(request.key.size() == 1,
            "a paged cache must be one key and one value tensor, not " + number(request.key.size()));
    require(bool(request.key_lengths) && request.key_lengths.size() > 0,
            "a paged cache requires actual_seq_lengths_kv");
    const auto &key = request.key[0], &value = request.value[0];
    auto key_cache = paged_cache(key, plan.kv_heads), value_cache = paged_cache(value, plan.kv_heads);
    require(key_cache.blocks == value_cache.blocks && key_cache.block_size == value_cache.block_size,
            "the key and value caches must have the same number of blocks and block_size, but have shapes " +
                c10::str(key.sizes(), " and ", value.sizes()));
    require(key_cache.dim == dim, "query and cache must have the same head dimension, but have " + number(dim) +
                                      " and " + number(key_cache.dim));
    bool any_head_dim =
        plan.layout.packed && cann_release() >= 901 && takes_any_head_dim(request, plan.heads, plan.kv_heads);
    require(key.dim() != 5 || dim == 64 || dim == 128 || any_head_dim || request.query_rope,
            "the head dimension of a paged cache in FRACTAL_NZ must be 64 or 128, but is " + number(dim));
    bool rows_first = plan.layout.input == "BSH" || plan.layout.input == "BSND";
    require(
        !(rows_first && key.dim() == 4),
        "with a query in " + plan.layout.input +
            ", a paged cache must have shape [blocks, block_size, H]; [blocks, N, block_size, D] requires BNSD or TND");
    require(key.dim() != 3 || key.size(2) <= 65535,
            "H of a paged cache of shape [blocks, block_size, H] must be at most 65535, but is " + number(key.size(2)) +
                "; use [blocks, N, block_size, D]");
    check_block_size(request, plan, key_cache.block_size);
}

DOCUMENTED("op-plugin: docs/context/torch_npu-npu_fused_infer_attention_score.md (key_antiquant_mode)");
void check_scales(const InferAttention& request, const AttentionPlan& plan) {
    require(bool(request.key_scale) && bool(request.value_scale),
            "key_antiquant_scale and value_antiquant_scale must be given together");
    require(request.key_mode == request.value_mode, "key_antiquant_mode and value_antiquant_mode must be equal");
    require(plan.paged && plan.decode,
            "a scale of each token and head in blocks requires a block_table and one query per sequence");
    require(request.block_size % 32 == 0,
            "block_size of an int8 cache must be a multiple of 32, but is " + number(request.block_size));
    const int64_t blocks = request.key[0].size(0);
    for (const auto* scale : {&request.key_scale, &request.value_scale}) {
        require(scale->dtype() == at::kFloat && scale->raw().is_contiguous(),
                "key_antiquant_scale and value_antiquant_scale must be float32 and contiguous");
        require(scale->sizes() == at::IntArrayRef({blocks, plan.kv_heads, request.block_size}),
                "key_antiquant_scale and value_antiquant_scale must have shape [" + number(blocks) + ", " +
                    number(plan.kv_heads) + ", " + number(request.block_size) + "], not " + c10::str(scale->sizes()));
    }
}

// Checks that the cache has as many blocks as the lengths need, counting shared blocks once for each sequence.
void check_blocks(const InferAttention& request, const AttentionPlan& plan) {
    if (plan.decode) return;
    int64_t blocks = request.key[0].size(0), taken = 0;
    for (auto& span : plan.keys) taken += (span.length + request.block_size - 1) / request.block_size;
    require(!plan.layout.packed || taken > 0, "actual_seq_lengths_kv in a TND layout must not all be 0");
    require(taken <= blocks, "actual_seq_lengths_kv must need at most the cache's " + number(blocks) +
                                 " blocks, counting shared blocks once for each sequence, but need " + number(taken));
}

void check_mask(const InferAttention& request, const AttentionPlan& plan) {
    const auto& mask = request.mask;
    int64_t mode = request.sparse_mode;
    require(mode >= 0 && mode <= 4, "sparse_mode must be 0, 1, 2, 3 or 4, but is " + number(mode));
    if (plan.decode && mode >= 2 && !request.query_rope) return;  // ignored for one query per sequence
    require(bool(mask) || mode == 0, "sparse_mode " + number(mode) + " requires atten_mask");
    if (!mask) return;
    require(mask.dtype() == at::kBool || mask.dtype() == at::kChar || mask.dtype() == at::kByte,
            std::string("atten_mask must be bool, int8 or uint8, not ") + c10::toString(mask.dtype()));
    require(mask.raw().is_contiguous(), "atten_mask must be contiguous");
    auto shape = mask.sizes();
    int64_t dims = mask.dim();
    require(dims >= 2 && dims <= 4, "atten_mask must have 2, 3 or 4 dimensions, not " + number(dims));
    if (mode >= 2) {
        bool fits = shape[dims - 1] == kCausalTemplate && shape[dims - 2] == kCausalTemplate;
        for (int64_t d = 0; d < dims - 2; ++d) fits = fits && shape[d] == 1;
        require(fits, "atten_mask for sparse_mode " + number(mode) +
                          " must have shape [2048, 2048], independent of the lengths, not " + c10::str(shape));
        return;
    }
    require(!plan.layout.packed,
            "atten_mask in a TND layout requires sparse_mode 2, 3 or 4, but sparse_mode is " + number(mode));
    bool by_batch = dims > 2 || plan.decode;
    require(!by_batch || shape[0] == 1 || shape[0] == plan.batch,
            "the first dimension of atten_mask must be 1 or the batch size, " + number(plan.batch) + ", but is " +
                number(shape[0]));
    require(dims < 4 || shape[1] == 1,
            "the second dimension of atten_mask must be 1, for all heads, but is " + number(shape[1]));
    int64_t rows = dims == 2 && plan.decode ? 1 : shape[dims - 2];
    require(rows >= plan.query_rows && shape[dims - 1] >= plan.key_rows,
            "atten_mask must cover " + number(plan.query_rows) + " queries and " + number(plan.key_rows) +
                " keys, but covers " + number(rows) + " and " + number(shape[dims - 1]));
}

}  // namespace

DOCUMENTED(
    "ops-transformer: attention/fused_infer_attention_score/docs/aclnnFusedInferAttentionScoreV4.md"
    "; ops-transformer: attention/incre_flash_attention/docs/aclnnIncreFlashAttentionV4.md"
    "; ops-transformer: attention/prompt_flash_attention/docs/aclnnPromptFlashAttentionV3.md");
AttentionPlan::AttentionPlan(const InferAttention& request)
    : layout(request.layout), heads(request.heads), kv_heads(request.kv_heads ? request.kv_heads : request.heads) {
    check_tensors(request);
    const auto& query = request.query;
    int64_t dims = layout.input == "BNSD" || layout.input == "BSND" ? 4 : 3;
    require(query.dim() == dims,
            "a query in " + layout.input + " must have " + number(dims) + " dimensions, not " + number(query.dim()));
    require(heads > 0 && (layout.input != "BSH" || query.size(2) % heads == 0),
            "num_heads, " + number(heads) + ", must be positive and divide the query's last dimension, " +
                number(query.size(-1)));
    auto by_head = by_heads(query.raw(), layout.input, heads);
    int64_t rows = by_head.size(-2), dim = by_head.size(-1);
    require(by_head.size(-3) == heads,
            "num_heads must be that of the query, " + number(by_head.size(-3)) + ", but is " + number(heads));
    check_heads(heads, kv_heads, dim, bool(request.query_rope));
    if (request.query_rope || request.key_rope)
        check_rope(request, layout, heads, kv_heads, dim);
    else if (layout.packed)
        check_packed(request, heads, kv_heads, dim);
    if (request.sink) check_sink(request, heads, dim);
    paged = bool(request.block_table);
    if (layout.packed) {
        queries = packed_spans(request.query_lengths, rows, "actual_seq_lengths");
        batch = queries.size(), decode = false, query_rows = rows;
    } else {
        batch = query.size(0), decode = rows == 1, query_rows = rows;
        // actual_seq_lengths is ignored with one query per sequence.
        queries = decode ? std::vector<Span>(batch, Span{0, 1})
                         : dense_spans(request.query_lengths, batch, rows, "actual_seq_lengths");
    }
    if (request.query_rope && dim == kLatentDim) check_latent_queries(request, queries);
    require(batch <= 65536, "the batch size must be at most 65536, but is " + number(batch));
    if (paged) {
        check_paging(request, *this, dim);
        key_rows = request.block_table.size(1) * request.block_size;
        keys = dense_spans(request.key_lengths, batch, key_rows, "actual_seq_lengths_kv");
        check_blocks(request, *this);
    } else if (layout.packed) {
        require(request.key.size() == 1,
                "a TND layout requires one key and one value tensor, not " + number(request.key.size()));
        key_rows = by_heads(request.key[0].raw(), layout.input, kv_heads).size(1);
        keys = packed_spans(request.key_lengths, key_rows, "actual_seq_lengths_kv");
        require(keys.size() == queries.size(),
                "actual_seq_lengths and actual_seq_lengths_kv must have the same number of entries, but have " +
                    number(queries.size()) + " and " + number(keys.size()));
    } else {
        require(request.key.size() == 1 || static_cast<int64_t>(request.key.size()) == batch,
                "key and value must be one tensor, or one for each of the " + number(batch) + " sequences, not " +
                    number(request.key.size()));
        key_rows = 0;
        for (auto& key : request.key.items) {
            require(key.dim() == dims,
                    "key in " + layout.input + " must have " + number(dims) + " dimensions, not " + number(key.dim()));
            require(layout.input != "BSH" || key.size(2) % kv_heads == 0,
                    "num_key_value_heads, " + number(kv_heads) + ", must divide the key's last dimension, " +
                        number(key.size(2)));
            auto view = by_heads(key.raw(), layout.input, kv_heads);
            require(view.size(1) == kv_heads && (view.size(2) == 0 || view.size(3) == dim) &&
                        view.size(0) == (request.key.size() == 1 ? batch : 1),
                    "key must have the query's batch size and head dimension, and " + number(kv_heads) +
                        " heads, but has shape " + c10::str(key.sizes()));
            key_rows = std::max(key_rows, view.size(2));
        }
        keys = dense_spans(request.key_lengths, batch, key_rows, "actual_seq_lengths_kv");
        if (request.key.size() > 1)
            for (int64_t b = 0; b < batch; ++b)
                keys[b].length =
                    std::min(keys[b].length, by_heads(request.key[b].raw(), layout.input, kv_heads).size(2));
    }
    if (request.key_scale || request.value_scale) check_scales(request, *this);
    check_mask(request, *this);
}

at::Tensor hidden_keys(const InferAttention& request, const AttentionPlan& plan, int64_t sequence) {
    int64_t queries = plan.queries[sequence].length, keys = plan.keys[sequence].length, mode = request.sparse_mode;
    if (!request.mask || (plan.decode && mode >= 2 && !request.query_rope)) return {};
    auto mask = request.mask.raw();
    if (mode >= 2) {
        check_causal_template(mask);
        constexpr int64_t all = int64_t{1} << 40;
        if (mode == 2) return outside_band(queries, keys, all, 0, 0);
        if (mode == 3) return outside_band(queries, keys, all, 0, keys - queries);
        return outside_band(queries, keys, request.before, request.after, keys - queries);
    }
    int64_t rows = mask.dim() == 2 && plan.decode ? 1 : mask.size(-2);
    mask = mask.view({-1, rows, mask.size(-1)});
    auto own = mask[mask.size(0) == 1 ? 0 : sequence].narrow(0, 0, queries).narrow(1, 0, keys).to(at::kBool);
    if (mode == 1 || plan.decode) return own;
    return either(own, outside_band(queries, keys, request.before, request.after, 0));
}

}  // namespace emulator
