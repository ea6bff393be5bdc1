// Sparse attention: the lightning indexer, which selects keys, and attention to the selected latents.
#include "selection.h"

#include <limits>

#include "grouped.h"
#include "numeric.h"

namespace emulator {

namespace {

constexpr int64_t kMostBlock = 1024, kUnlimited = std::numeric_limits<int64_t>::max();

int64_t at_row(const In& lengths, int64_t row) { return lengths.tensor()[row].item<int64_t>(); }

Span span_of(const In& lengths, bool cumulative, int64_t row, int64_t whole) {
    if (!lengths) return {0, whole};
    int64_t end = at_row(lengths, row), start = cumulative && row ? at_row(lengths, row - 1) : 0;
    UNDEFINED("a kernel would read outside its inputs");
    if (end < start || end - start > whole)
        throw std::runtime_error("a length is " + std::to_string(end - start) + ", but must be 0 to " +
                                 std::to_string(whole));
    return {start, end - start};
}

}  // namespace

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_lightning_indexer.md; "
           "op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_sparse_flash_attention.md");

void check_sparse(const Sparse& call, int64_t dim, int64_t key_dim, int64_t mode, int64_t before, int64_t after) {
    require(call.query_layout == "BSND" || call.packed(), "layout_query must be BSND or TND, not " + call.query_layout);
    require(call.paged() || call.key_layout == call.query_layout,
            "the layout of keys must be PA_BSND or that of the query, not " + call.key_layout);
    require(call.query.dim() == (call.packed() ? 3 : 4) && call.query.size(-1) == dim,
            "query must have shape [B, S, N, " + std::to_string(dim) + "], or [T, N, " + std::to_string(dim) +
                "] in TND, not " + shown(call.query.sizes()));
    require(call.key.dim() == (call.key_layout == "TND" ? 3 : 4) && call.key.size(-1) == key_dim &&
                call.key.size(-2) == 1,
            "key must have one head of " + std::to_string(key_dim) + " elements, but has shape " +
                shown(call.key.sizes()));
    require(call.query.raw().is_contiguous(), "query must be contiguous");
    require(call.key.raw().is_contiguous() || product_line("sparse attention") == Line::a5, "key must be contiguous");
    require(bool(call.query_lengths) || !call.packed(), "TND requires actual_seq_lengths_query");
    require(bool(call.key_lengths) || call.key_layout == "BSND", "TND and PA_BSND require the lengths of keys");
    for (const In* each : {&call.query_lengths, &call.key_lengths}) {
        require_dtype(*each, {at::kInt}, "the lengths");
        require_shape(*each, {call.batch()}, "the lengths");
    }
    require(mode == 0 || mode == 3, "sparse_mode must be 0 or 3, not " + std::to_string(mode));
    require(before == kUnlimited && after == kUnlimited, "pre_tokens and next_tokens must have their defaults");
    if (!call.paged()) return;
    require(bool(call.table), "PA_BSND requires a block_table");
    require_dtype(call.table, {at::kInt}, "block_table");
    require(call.table.dim() == 2 && call.table.size(0) == call.batch(),
            "block_table must have a row for each sequence, but has shape " + shown(call.table.sizes()));
    require(call.key.size(1) % 16 == 0 && call.key.size(1) <= kMostBlock,
            "the block size must be a multiple of 16, and at most 1024, but is " + std::to_string(call.key.size(1)));
}

void check_indices(const Sparse& call, const In& indices) {
    require_dtype(indices, {at::kInt}, "sparse_indices");
    auto wanted = call.query.sizes().vec();
    wanted[wanted.size() - 2] = 1, wanted.back() = indices.size(-1);
    require_shape(indices, wanted, "sparse_indices");
    require(indices.raw().is_contiguous(), "sparse_indices must be contiguous");
}

Sequence::Sequence(const Sparse& call, int64_t row)
    : call(call),
      row(row),
      queries(span_of(call.query_lengths, call.packed(), row, call.query.size(call.packed() ? 0 : 1))),
      keys(span_of(call.key_lengths, call.key_layout == "TND", row,
                   call.paged()               ? call.table.size(1) * call.key.size(1)
                   : call.key_layout == "TND" ? call.key.size(0)
                                              : call.key.size(1))) {}

at::Tensor Sequence::of_queries(const at::Tensor& tensor) const {
    return (call.packed() ? tensor : tensor[row]).narrow(0, queries.start, queries.length);
}

at::Tensor Sequence::of_keys(const at::Tensor& tensor) const {
    if (call.paged())
        return gather_blocks(tensor.squeeze(2), call.table.raw()[row], 1, tensor.size(1), keys.length).squeeze(0);
    return (call.key_layout == "TND" ? tensor : tensor[row]).narrow(0, keys.start, keys.length).squeeze(1);
}

void choose(const Sequence& sequence, const at::Tensor& scores, int64_t count, int64_t mode, const Out& indices,
            const Out* best) {
    auto result = sequence.of_queries(indices.raw()).squeeze(1);
    int64_t queries = sequence.queries.length, keys = sequence.keys.length, taken = std::min(count, keys);
    auto hidden = mode == 3 ? outside_band(queries, keys, int64_t{1} << 40, 0, keys - queries) : at::Tensor();
    auto seen = hidden.defined() ? scores.masked_fill(hidden, -std::numeric_limits<float>::infinity()) : scores;
    auto [ranked, order] = seen.sort(/*stable=*/true, -1, /*descending=*/true);
    order = order.narrow(1, 0, taken);
    if (best) {  // those of invalid indices keep what they held
        auto own = sequence.of_queries(best->raw()).squeeze(1).narrow(1, 0, taken);
        auto found = ranked.narrow(1, 0, taken);
        own.copy_(at::where(found.isinf(), own.to(at::kFloat), found));
    }
    if (hidden.defined()) order = order.masked_fill(hidden.gather(1, order), -1);
    result.narrow(1, 0, taken).copy_(order);
}

void attend_to_chosen(const Sequence& sequence, const at::Tensor& queries, const at::Tensor& keys,
                      const at::Tensor& values, const In& indices, int64_t mode, double scale,
                      const std::function<void(int64_t, const AttentionResult&)>& store) {
    auto chosen = sequence.of_queries(indices.raw()).squeeze(1).to(at::kLong);
    int64_t count = sequence.queries.length, length = sequence.keys.length;
    UNDEFINED("a kernel stops at the first invalid index, and would read outside the sequence at a larger one");
    if (((chosen.slice(1, 1) >= 0) & (chosen.slice(1, 0, -1) < 0)).any().item<bool>() ||
        (chosen >= length).any().item<bool>())
        throw std::runtime_error("sparse_indices must be positions of the sequence, then -1");
    for (int64_t token = 0; token < count; ++token) {
        auto own = chosen[token];
        own = own.masked_select(mode == 3 ? (own >= 0) & (own <= length - count + token) : own >= 0);
        store(token, attend({.query = queries[token].unsqueeze(1),
                             .key = keys.index_select(0, own).unsqueeze(0),
                             .value = values.index_select(0, own).unsqueeze(0),
                             .scale = scale}));
    }
}

}  // namespace emulator

namespace {

using namespace emulator;

constexpr int64_t kIndexDim = 128, kMostIndexHeads = 64, kLatent = 512, kRope = 64;

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_lightning_indexer.md; "
           "op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_sparse_flash_attention.md");
void check_halves(const Sparse& call) {
    require_dtype(call.query, {at::kHalf, at::kBFloat16}, "query");
    require(call.key.dtype() == call.query.dtype(), "key must have the query's dtype");
}

Sparse indexer(In query, In key, In query_lengths, In key_lengths, In table, const Text& query_layout,
               const Text& key_layout) {
    return {query, key, table, query_lengths, key_lengths, query_layout.value, key_layout.value};
}

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_lightning_indexer.md");

void check_indexer(In query, In key, In weights, In query_lengths, In key_lengths, In table, Text query_layout,
                   Text key_layout, int64_t count, int64_t mode, int64_t before, int64_t after, bool want_values,
                   Out indices, Out values) {
    auto line = product_line("LightningIndexer");
    require(line != Line::inference, "it is not for " + soc_name());
    auto call = indexer(query, key, query_lengths, key_lengths, table, query_layout, key_layout);
    check_halves(call);
    check_sparse(call, kIndexDim, kIndexDim, mode, before, after);
    int64_t heads = call.heads();
    require(heads <= kMostIndexHeads, "query must have at most 64 heads, but has " + std::to_string(heads));
    if (line == Line::a5)
        require(heads == 8 || heads == 16 || heads == 24 || heads == 32 || heads == 64,
                "query must have 8, 16, 24, 32 or 64 heads on this device, but has " + std::to_string(heads));
    require(weights.dtype() == query.dtype() || (weights.dtype() == at::kFloat && line != Line::a5),
            "weights must have the query's dtype, or float32 on A2 and A3");
    require_shape(weights, query.sizes().slice(0, query.dim() - 1), "weights");
    require(weights.raw().is_contiguous(), "weights must be contiguous");
    require(count >= 1 && (count <= 2048 || (count <= 8192 && count % 1024 == 0)),
            "sparse_count must be 1 to 2048, or 3072, 4096, 5120, 6144, 7168 or 8192, but is " + std::to_string(count));
    require(!want_values || !call.paged(), "return_value must be False with PA_BSND");
    if (want_values) require_shape(values, indices.sizes(), "sparse_values");
}

void LightningIndexer(In query, In key, In weights, In query_lengths, In key_lengths, In table, Text query_layout,
                      Text key_layout, int64_t count, int64_t mode, int64_t, int64_t, bool want_values, Out indices,
                      Out best) {
    auto call = indexer(query, key, query_lengths, key_lengths, table, query_layout, key_layout);
    for (int64_t row = 0; row < call.batch(); ++row) {
        Sequence sequence(call, row);
        sequence.of_queries(indices.raw()).fill_(-1);
        if (sequence.queries.length == 0 || sequence.keys.length == 0) continue;
        auto products = at::matmul(sequence.of_queries(query.raw()).to(at::kFloat),
                                   sequence.of_keys(key.raw()).to(at::kFloat).t());  // [queries, heads, keys]
        auto factors = sequence.of_queries(weights.raw()).to(at::kFloat).unsqueeze(1);
        auto scores = at::matmul(factors, at::relu(products)).squeeze(1);
        choose(sequence, scores, count, mode, indices, want_values ? &best : nullptr);
    }
}

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_sparse_flash_attention.md");

void check_attention(In query, In key, In value, In indices, In table, In query_lengths, In key_lengths, In query_rope,
                     In key_rope, double, int64_t block, Text query_layout, Text key_layout, int64_t mode,
                     int64_t before, int64_t after, int64_t attention_mode, bool want_lse, Out out, Out, Out) {
    auto line = product_line("SparseFlashAttention");
    require(line != Line::inference, "it is not for " + soc_name());
    auto call = indexer(query, key, query_lengths, key_lengths, table, query_layout, key_layout);
    check_halves(call);
    check_sparse(call, kLatent, kLatent, mode, before, after);
    int64_t heads = call.heads();
    require(heads <= 128 && (line == Line::a5 || (heads & (heads - 1)) == 0),
            "query must have 1, 2, 4, 8, 16, 32, 64 or 128 heads, but has " + std::to_string(heads));
    require(attention_mode == 2, "attention_mode must be 2, but is " + std::to_string(attention_mode));
    require(query_rope && key_rope, "attention_mode 2 requires query_rope and key_rope");
    require(!value || (value.sizes() == key.sizes() && value.dtype() == key.dtype()), "value must be like key");
    require(((!value || value.raw().is_contiguous()) && key_rope.raw().is_contiguous()) || line == Line::a5,
            "value and key_rope must be contiguous");
    auto rotary = [](const In& of) {
        auto shape = of.sizes().vec();
        shape.back() = kRope;
        return shape;
    };
    require_shape(query_rope, rotary(query), "query_rope");
    require_shape(key_rope, rotary(key), "key_rope");
    require(query_rope.dtype() == query.dtype() && key_rope.dtype() == query.dtype(),
            "query_rope and key_rope must have the query's dtype");
    require(query_rope.raw().is_contiguous(), "query_rope must be contiguous");
    check_indices(call, indices);
    if (block != 1) throw NotEmulated("sparse_block_size other than 1 is not emulated");
    require(!want_lse || !call.paged(), "return_softmax_lse must be False with PA_BSND");
}

void SparseFlashAttention(In query, In key, In value, In indices, In table, In query_lengths, In key_lengths,
                          In query_rope, In key_rope, double scale, int64_t, Text query_layout, Text key_layout,
                          int64_t mode, int64_t, int64_t, int64_t, bool want_lse, Out out, Out most, Out total) {
    auto call = indexer(query, key, query_lengths, key_lengths, table, query_layout, key_layout);
    for (int64_t row = 0; row < call.batch(); ++row) {
        Sequence sequence(call, row);
        if (sequence.queries.length == 0) continue;
        auto result = sequence.of_queries(out.raw());  // [queries, heads, D]
        if (sequence.keys.length == 0) {
            result.zero_();
            continue;
        }
        auto join = [](const at::Tensor& first, const at::Tensor& second) { return at::cat({first, second}, -1); };
        auto latents = sequence.of_keys(key.raw());
        attend_to_chosen(sequence, join(sequence.of_queries(query.raw()), sequence.of_queries(query_rope.raw())),
                         join(latents, sequence.of_keys(key_rope.raw())), latents, indices, mode, scale,
                         [&](int64_t token, const AttentionResult& found) {
                             result[token].copy_(found.output.squeeze(1));
                             if (!want_lse) return;
                             for (auto [into, from] : {std::pair{&most, &found.max}, {&total, &found.sum}}) {
                                 auto first = (call.packed() ? into->raw() : into->raw()[row])[0];  // [queries, heads]
                                 first[sequence.queries.start + token].copy_(from->squeeze(1));
                             }
                         });
    }
}

}  // namespace

ACLNN(LightningIndexer, .check = check_indexer)
ACLNN(SparseFlashAttention, .check = check_attention)
