// Sparse attention with int8 keys: the indexer, and attention to latents that hold their scales.
#include "grouped.h"
#include "numeric.h"
#include "selection.h"

namespace {

using namespace emulator;

constexpr int64_t kQuantIndexDim = 128, kQuantLatent = 512, kQuantRope = 64, kTile = 128;
// The bytes of a latent: int8, then its rotary part in 16 bits, then a float32 scale for each tile.
constexpr int64_t kRopeBytes = 2 * kQuantRope, kScaleBytes = 4 * kQuantLatent / kTile;
constexpr int64_t kKeyBytes = kQuantLatent + kRopeBytes + kScaleBytes;

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_quant_lightning_indexer.md");
void check_indexer(In query, In key, In weights, In query_scale, In key_scale, In query_lengths, In key_lengths,
                   In table, int64_t query_mode, int64_t key_mode, Text query_layout, Text key_layout, int64_t count,
                   int64_t mode, int64_t before, int64_t after, Out indices) {
    auto line = product_line("QuantLightningIndexer");
    require(line != Line::inference && !soc_name().starts_with("Ascend910B"), "it is not for " + soc_name());
    if (query.dtype() != at::kChar) throw NotEmulated("a query that is not int8 is not emulated");
    require_dtype(key, {at::kChar}, "key");
    Sparse call{query, key, table, query_lengths, key_lengths, query_layout.value, key_layout.value};
    check_sparse(call, kQuantIndexDim, kQuantIndexDim, mode, before, after);
    require(call.heads() <= 64, "query must have at most 64 heads, but has " + std::to_string(call.heads()));
    require(query_mode == 0 && key_mode == 0, "query_quant_mode and key_quant_mode must be 0");
    auto rows = query.sizes().slice(0, query.dim() - 1), keys = key.sizes().slice(0, key.dim() - 1);
    for (const In* each : {&weights, &query_scale, &key_scale})
        require_dtype(*each, {at::kHalf}, "weights and scales of int8 queries and keys");
    require_shape(weights, rows, "weights");
    require_shape(query_scale, rows, "query_dequant_scale");
    require_shape(key_scale, keys, "key_dequant_scale");
    require(count >= 1 && count <= 2048, "sparse_count must be 1 to 2048, but is " + std::to_string(count));
}

void QuantLightningIndexer(In query, In key, In weights, In query_scale, In key_scale, In query_lengths,
                           In key_lengths, In table, int64_t, int64_t, Text query_layout, Text key_layout,
                           int64_t count, int64_t mode, int64_t, int64_t, Out indices) {
    Sparse call{query, key, table, query_lengths, key_lengths, query_layout.value, key_layout.value};
    for (int64_t row = 0; row < call.batch(); ++row) {
        Sequence sequence(call, row);
        sequence.of_queries(indices.raw()).fill_(-1);
        if (sequence.queries.length == 0 || sequence.keys.length == 0) continue;
        auto scales = sequence.of_keys(key_scale.raw().unsqueeze(-1)).to(at::kFloat).view({1, 1, -1});
        auto products = at::matmul(sequence.of_queries(query.raw()).to(at::kFloat),
                                   sequence.of_keys(key.raw()).to(at::kFloat).t());  // [queries, heads, keys]
        products = products * scales * sequence.of_queries(query_scale.raw()).to(at::kFloat).unsqueeze(-1);
        auto factors = sequence.of_queries(weights.raw()).to(at::kFloat).unsqueeze(1);
        choose(sequence, at::matmul(factors, at::relu(products)).squeeze(1), count, mode, indices, nullptr);
    }
}

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_kv_quant_sparse_flash_attention.md");
void check_quantized_attention(In query, In key, In value, In indices, In key_scale, In value_scale, In table, In query_lengths,
                     In key_lengths, double, int64_t key_mode, int64_t value_mode, int64_t block, Text query_layout,
                     Text key_layout, int64_t mode, int64_t before, int64_t after, int64_t attention_mode,
                     int64_t repository, int64_t tile, int64_t rope, Out out) {
    auto line = product_line("KvQuantSparseFlashAttention");
    require(line != Line::inference, "it is not for " + soc_name());
    require_dtype(query, {at::kHalf, at::kBFloat16}, "query");
    if (key.dtype() != at::kChar) throw NotEmulated("a key that is not int8 is not emulated");
    Sparse call{query, key, table, query_lengths, key_lengths, query_layout.value, key_layout.value};
    check_sparse(call, kQuantLatent + kQuantRope, kKeyBytes, mode, before, after);
    int64_t heads = call.heads();
    require(heads <= 128 && ((heads & (heads - 1)) == 0 || (heads == 48 && line == Line::a5)),
            "query must have 1, 2, 4, 8, 16, 32, 64 or 128 heads, but has " + std::to_string(heads));
    require(value.dtype() == key.dtype(), "value must have the dtype of key");
    require(!key_scale && !value_scale, "key_dequant_scale and value_dequant_scale must not be given");
    require(key_mode == 2 && value_mode == 2, "key_quant_mode and value_quant_mode must be 2");
    require(attention_mode == 2, "attention_mode must be 2, but is " + std::to_string(attention_mode));
    require(repository == 1 && tile == kTile && rope == kQuantRope,
            "quant_scale_repo_mode must be 1, tile_size 128 and rope_head_dim 64");
    check_indices(call, indices);
    if (block != 1) throw NotEmulated("sparse_block_size other than 1 is not emulated");
}

void KvQuantSparseFlashAttention(In query, In key, In, In indices, In, In, In table, In query_lengths, In key_lengths,
                                 double scale, int64_t, int64_t, int64_t, Text query_layout, Text key_layout,
                                 int64_t mode, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, Out out) {
    Sparse call{query, key, table, query_lengths, key_lengths, query_layout.value, key_layout.value};
    for (int64_t row = 0; row < call.batch(); ++row) {
        Sequence sequence(call, row);
        if (sequence.queries.length == 0) continue;
        auto result = sequence.of_queries(out.raw());  // [queries, heads, D]
        if (sequence.keys.length == 0) {
            result.zero_();
            continue;
        }
        auto bytes = sequence.of_keys(key.raw());
        auto part = [&](int64_t start, int64_t length, at::ScalarType dtype) {
            return bytes.narrow(1, start, length).contiguous().view(dtype);
        };
        auto scales = part(kQuantLatent + kRopeBytes, kScaleBytes, at::kFloat);  // [keys, tiles]
        auto latents = bytes.narrow(1, 0, kQuantLatent).to(at::kFloat).unflatten(1, {-1, kTile}) * scales.unsqueeze(-1);
        latents = latents.flatten(1);
        auto keys = at::cat({latents, part(kQuantLatent, kRopeBytes, query.dtype()).to(at::kFloat)}, 1);
        attend_to_chosen(sequence, sequence.of_queries(query.raw()), keys, latents, indices, mode, scale,
                         [&](int64_t token, const AttentionResult& found) {
                             result[token].copy_(found.output.squeeze(1));
                         });
    }
}

}  // namespace

ACLNN(QuantLightningIndexer, .check = check_indexer)
ACLNN(KvQuantSparseFlashAttention, .check = check_quantized_attention)
