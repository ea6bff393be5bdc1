// Attention of prompts, whose keys and values are tensors or a paged cache.
#include "self_attention.h"

#include <numeric>

#include "ops/attention_core.h"
#include "ops/attention_layout.h"
#include "ops/grouped.h"
#include "ops/numeric.h"

namespace atb {

namespace infer {
struct SelfAttentionParam {
    int quantized;  // 0: not quantized
    aclDataType output_dtype;
    int32_t heads, kv_heads;
    float query_scale, scale;
    bool batch_run_status;
    uint32_t triangular;
    int calculation;  // 3: of a prompt, 4: of a prompt with a prefix in a paged cache
    int kernel;       // 1: products in float32; 2: another exponential
    int clamp;
    float least, most;
    int mask;
    int caches, scaling, layout;
    uint32_t latent_value_dim;
    int8_t window_cache;
    uint32_t window;
    uint8_t reserved[64];
};
}  // namespace infer

namespace {

using namespace emulator;

constexpr int kPrompt = 3, kPrefix = 4;
constexpr int64_t kBlock = 128, kMostPagedDim = 128, kMostDim = 576, kTemplate = 128;

UNDEFINED("the documents require these masks, but a kernel does not check them");
void check_template(const at::Tensor& mask) {
    auto at = [&](int64_t row, int64_t column) { return mask[row][column].item<float>() != 0; };
    int64_t last = kTemplate - 1;
    if (at(0, 0) || !at(0, 1) || at(last, 0) || !at(0, last) || at(last, last) || !at(last - 1, last))
        throw std::runtime_error("a compressed mask must be 0 up to the diagonal, and not 0 above it");
}
at::Tensor hidden_by(const at::Tensor& mask) {
    if (!mask.eq(0).logical_or(mask.eq(1)).all().item<bool>())
        throw std::runtime_error(
            "the mask of bfloat16, and of the kernel in float32, must be 1 where a query must not attend to a key, and "
            "0 elsewhere");
    return mask.ne(0);
}

UNDEFINED("a kernel would read outside its inputs");
void check_lengths(const SelfAttentionCall& call) {
    int64_t total = std::accumulate(call.queries.begin(), call.queries.end(), int64_t{0}), keys = 0;
    int64_t room = call.paged ? call.table.size(1) * kBlock : 0;
    require(call.queries.size() == call.keys.size(), "there must be a length of keys for each length of queries");
    for (size_t b = 0; b < call.queries.size(); ++b) {
        require(call.queries[b] >= 0 && call.keys[b] >= 0, "the lengths must not be negative");
        require(!call.paged || call.keys[b] <= room,
                "block_table has room for " + text(room) + " keys, but a length is " + text(call.keys[b]));
        keys += call.keys[b];
    }
    require(total <= call.query.size(0),
            "the lengths of the queries sum to " + text(total) + ", but query has " + text(call.query.size(0)) +
                " rows");
    require(call.paged || keys <= call.key.size(0), "the lengths of the keys sum to " + text(keys) +
                                                        ", but key has " + text(call.key.size(0)) + " rows");
}

DOCUMENTED("hiascend: zh/canncommercial/900/API/ascendtb/ascendtb_01_0266.html (the cache)");
void check_paged(const SelfAttentionCall& call) {
    const In &key = call.key, &value = call.value;
    require(key.dim() == 3 || key.dim() == 4, "a cache must have shape [blocks, 128, N, D] or [blocks, 128, H], not " +
                                                  shown(key.sizes()));
    require(key.size(1) == kBlock, "block_size must be 128, but is " + text(key.size(1)));
    require(value.sizes() == key.sizes(), "the caches must have the same shape, but have " + shown(key.sizes()) +
                                              " and " + shown(value.sizes()));
    int64_t width = key.dim() == 4 ? key.size(2) * key.size(3) : key.size(2), dim = width / call.kv_heads;
    require(dim * call.kv_heads == width && dim % 16 == 0 && dim <= kMostPagedDim,
            "the head dimension must be a multiple of 16 up to 128, but a cache has " + text(width) +
                " elements a token for " + text(call.kv_heads) + " heads");
    require_dtype(call.table, {at::kInt}, "block_table");
    require(call.table.dim() == 2 && call.table.size(0) == int64_t(call.queries.size()),
            "block_table must have a row for each sequence, but has shape " + shown(call.table.sizes()));
    for (size_t b = 0; b < call.queries.size(); ++b)
        require(call.keys[b] >= call.queries[b] && (call.keys[b] - call.queries[b]) % kBlock == 0,
                "the prefix of a sequence, its keys less its queries, must be a multiple of 128, but a sequence has " +
                    text(call.keys[b]) + " keys and " + text(call.queries[b]) + " queries");
}

DOCUMENTED(
    "hiascend: zh/canncommercial/900/API/ascendtb/ascendtb_01_0265.html (the mask)"
    "; hiascend: zh/canncommercial/900/API/ascendtb/ascendtb_01_0266.html (the mask)");
void check_mask(const SelfAttentionCall& call) {
    if (call.mask_type == kNoMask || call.mask_type == kCausal) return;
    const In& mask = call.mask;
    require_dtype(mask, {at::kHalf, at::kBFloat16}, "mask");
    int64_t batch = call.queries.size();
    if (call.mask_type == kCompressed) {
        require_shape(mask, {kTemplate, kTemplate}, "a compressed mask");
        return;
    }
    int64_t most = 0;
    for (auto each : call.queries) most = std::max(most, each);
    for (auto each : call.keys) most = std::max(most, each);
    bool alibi = call.mask_type == kAlibi, square = mask.dim() >= 2 && mask.size(-1) == mask.size(-2);
    bool fits = alibi ? square && mask.dim() == 4 && mask.size(0) == batch && mask.size(1) == call.heads
                      : (mask.dim() == 2 && square) ||
                            (mask.dim() == 3 && mask.size(0) == batch && (square || mask.size(1) == 1));
    require(fits && mask.size(-1) >= most,
            std::string("mask must have shape ") +
                (alibi ? "[batch, heads, S, S]" : "[S, S], [batch, S, S] or [batch, 1, S]") +
                " with S at least the longest sequence, " + text(most) + ", but has " + shown(mask.sizes()));
}

DOCUMENTED("hiascend: zh/CANNCommunityEdition/900beta2/API/ascendtbapi/ascendtb_01_0268.html");
void check(const SelfAttentionCall& call) {
    if (product_line("SelfAttentionOperation") == Line::inference)
        throw NotEmulated("the layouts of SelfAttentionOperation for " + soc_name() + " are not emulated");
    const In& query = call.query;
    require_dtype(query, {at::kHalf, at::kBFloat16}, "query");
    require(call.key.dtype() == query.dtype() && call.value.dtype() == query.dtype() &&
                call.output.dtype() == query.dtype(),
            "query, key, value and out must have the same dtype");
    require(call.heads >= 1 && call.kv_heads >= 1 && call.heads % call.kv_heads == 0,
            "num_heads, " + text(call.heads) + ", must be a multiple of num_kv_heads, " + text(call.kv_heads));
    require(query.dim() == 2 || query.dim() == 3,
            "query must have shape [tokens, N, D] or [tokens, N * D], not " + shown(query.sizes()));
    require(query.dim() == 2 ? query.size(1) % call.heads == 0 : query.size(1) == call.heads,
            "query must have " + text(call.heads) + " heads, but has shape " + shown(query.sizes()));
    if (call.paged) {
        check_paged(call);
    } else {
        require(call.key.dim() == query.dim() && call.value.dim() == query.dim(),
                "query, key and value must have the same number of dimensions");
        for (const In* each : {&call.key, &call.value})
            require(each->dim() == 2 ? each->size(1) % call.kv_heads == 0 : each->size(1) == call.kv_heads,
                    "key and value must have " + text(call.kv_heads) + " heads, but one has shape " +
                        shown(each->sizes()));
    }
    auto dim = [](const In& of, int64_t heads) { return of.raw().numel() / std::max<int64_t>(1, of.size(0)) / heads; };
    if (!call.paged) {
        require(dim(call.key, call.kv_heads) == dim(query, call.heads),
                "key must have the head dimension of query, but they have shapes " + shown(call.key.sizes()) + " and " +
                    shown(query.sizes()));
        require(dim(query, call.heads) <= kMostDim && dim(call.value, call.kv_heads) <= kMostDim,
                "the head dimensions must be at most 576");
    }
    check_mask(call);
    check_lengths(call);
}

// The part of a mask that a sequence sees: [queries, keys], or [heads, queries, keys].
at::Tensor part_of(const at::Tensor& mask, int64_t b, int64_t queries, int64_t keys) {
    auto own = mask.dim() == 2 ? mask : mask[b];
    if (own.size(-2) > 1) own = own.narrow(-2, 0, queries);
    return own.narrow(-1, 0, keys);
}

void run(const SelfAttentionCall& call) {
    auto heads_first = [](const at::Tensor& rows, int64_t heads) {
        return rows.reshape({rows.size(0), heads, -1}).transpose(0, 1);
    };
    if (call.mask_type == kCompressed) check_template(call.mask.raw());
    int64_t query_start = 0, key_start = 0;
    for (size_t b = 0; b < call.queries.size(); ++b) {
        int64_t queries = call.queries[b], keys = call.keys[b];
        auto rows = [&](const In& tensor) -> at::Tensor {
            auto raw = tensor.raw();
            if (!call.paged) return heads_first(raw.narrow(0, key_start, keys), call.kv_heads);
            return gather_blocks(raw.flatten(2), call.table.raw()[b], call.kv_heads, kBlock, keys);
        };
        if (queries > 0 && keys > 0) {
            AttentionInputs inputs{
                .query = heads_first(call.query.raw().narrow(0, query_start, queries), call.heads),
                .key = rows(call.key),
                .value = rows(call.value),
                .scale = call.scale};
            if (call.mask_type == kCompressed || call.mask_type == kCausal) {
                inputs.hidden = outside_band(queries, keys, int64_t{1} << 40, 0, keys - queries);
            } else if (call.mask_type != kNoMask) {
                auto own = part_of(call.mask.raw(), b, queries, keys);
                if (call.mask_type == kPlain && (call.precise || own.scalar_type() == at::kBFloat16))
                    inputs.hidden = hidden_by(own);
                else
                    inputs.bias = own;
            }
            auto result = call.output.raw().narrow(0, query_start, queries);
            result.copy_(attend(inputs).output.transpose(0, 1).reshape(result.sizes()));
        }
        query_start += queries, key_start += keys;
    }
}

class SelfAttention : public EmulatedOperation {
  public:
    explicit SelfAttention(const infer::SelfAttentionParam& given)
        : EmulatedOperation("SelfAttentionOperation", 4 + (given.mask != kNoMask) + 2 * (given.calculation == kPrefix),
                            1, 4096),
          given_(given) {}

  private:
    Launch bind(const VariantPack& pack) const override {
        bool paged = given_.calculation == kPrefix;
        int masks = given_.mask != kNoMask, lengths = 3 + paged + masks;
        aclTensor handles[5], output = handle_of(pack.outputs[0]);
        for (int i = 0; i < lengths; ++i) handles[i] = handle_of(pack.inputs[i]);
        auto queries = host_numbers(pack.inputs[lengths], "seq_len"), keys = queries;
        if (paged) {
            keys = host_numbers(pack.inputs[lengths + 1], "context_lens");
        } else if (pack.inputs[lengths].desc.shape.count == 2) {  // [2, batch]: of queries and of keys
            keys.assign(queries.begin() + queries.size() / 2, queries.end());
            queries.resize(queries.size() / 2);
        }
        return self_attention({.query = &handles[0],
                               .key = &handles[1],
                               .value = &handles[2],
                               .table = paged ? &handles[3] : nullptr,
                               .mask = masks ? &handles[3 + paged] : nullptr,
                               .output = &output,
                               .queries = queries,
                               .keys = keys,
                               .heads = given_.heads,
                               .kv_heads = given_.kv_heads ? given_.kv_heads : given_.heads,
                               .scale = given_.scale,
                               .mask_type = given_.mask,
                               .paged = paged,
                               .precise = given_.kernel == 1});
    }

    infer::SelfAttentionParam given_;
};

}  // namespace

Launch self_attention(const SelfAttentionCall& call) {
    if (call.mask_type > kCompressed && call.mask_type != kCausal)
        throw NotEmulated("compressed masks of ALiBi and of windows are not emulated");
    check(call);
    Launch launch;
    for (auto* in : {&call.query, &call.key, &call.value, &call.table, &call.mask})
        if (*in) in->describe(launch.operands);
    call.output.describe(launch.operands);
    int64_t dim = call.query.raw().numel() / std::max<int64_t>(1, call.query.size(0)) / call.heads;
    for (size_t b = 0; b < call.queries.size(); ++b)
        launch.flops += attention_flops(call.heads, call.queries[b], call.keys[b], dim, dim);
    launch.run = [call] { run(call); };  // by value, because a replay may run after the operation was destroyed
    return launch;
}

template <>
Status CreateOperation<infer::SelfAttentionParam>(const infer::SelfAttentionParam& given, Operation** operation) {
    if (given.calculation != kPrompt && given.calculation != kPrefix)
        throw NotEmulated("ATB's SelfAttentionOperation with caches by layer is not emulated");
    if (given.quantized || given.batch_run_status || given.clamp || given.caches || given.scaling || given.layout ||
        given.latent_value_dim || given.window_cache || given.window)
        throw NotEmulated(
            "ATB's SelfAttentionOperation with quantization, clamping, a window, log-n scaling or the layout BNSD is "
            "not emulated");
    *operation = new SelfAttention(given);
    return 0;
}

}  // namespace atb
