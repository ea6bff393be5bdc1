// ATB's C functions: latent attention over a cache, of prompts in rings, of prompts with a prefix, reads of a cache and
// the choice of experts.
#include <numeric>

#include "ops/attention_core.h"
#include "ops/attention_layout.h"
#include "ops/numeric.h"
#include "self_attention.h"

namespace atb {

namespace {

using namespace emulator;

constexpr int64_t kLatent = 512, kRope = 64, kMostBlock = 128;
enum CacheMode : int { kTwoCaches = 1, kInt8Fractal = 2, kFractal = 3 };

OURS("what the stream says");
// One call of the C interface, with its tensors bound.
class Call : public Operation {
  public:
    explicit Call(Launch launch) : launch_(std::move(launch)) {}
    std::string GetName() const override { return launch_.kernel; }
    Status InferShape(const SVector<TensorDesc>&, SVector<TensorDesc>&) const override { return kInvalidParameter; }
    uint32_t GetInputNum() const override { return 0; }
    uint32_t GetOutputNum() const override { return 0; }
    Status Setup(const VariantPack&, uint64_t&, Context*) override { return 0; }
    Status Execute(const VariantPack&, uint8_t*, uint64_t, Context* context) override {
        if (int code = launch(context->GetExecuteStream(), launch_))
            throw std::runtime_error("ATB's " + launch_.kernel + " failed with " + std::to_string(code) + ": " +
                                     aclGetRecentErrMsg());
        return 0;
    }

  private:
    Launch launch_;
};

Status prepare(const char* name, uint64_t* workspace, Operation** operation, const std::function<Launch()>& bind) {
    *operation = new Call(bound_launch(name, bind));
    *workspace = 4096;
    return 0;
}

Status run(Operation* operation, Context* context) { return operation->Execute({}, nullptr, 0, context); }

std::vector<int64_t> on_host(const aclTensor* tensor, const char* name) {
    if (!tensor) return {};
    int64_t count = std::accumulate(tensor->shape.begin(), tensor->shape.end(), int64_t{1}, std::multiplies<int64_t>());
    auto* first = tensor->storage ? static_cast<const int32_t*>(tensor->storage) + tensor->offset : nullptr;
    return host_numbers(first, tensor->dtype, count, name);
}

// Binds a cache, whose tiles in FRACTAL_NZ are the last dimensions of its shape.
In cache_of(const aclTensor* handle) {
    if (!handle) return nullptr;
    aclTensor tiles = *handle;
    tiles.format = ACL_FORMAT_ND;
    return &tiles;
}

// Describes what a launch reads and writes.
Launch launch_on(std::initializer_list<const In*> inputs, std::initializer_list<const Out*> outputs) {
    Launch launch;
    for (auto* each : inputs)
        if (*each) each->describe(launch.operands);
    for (auto* each : outputs)
        if (*each) each->describe(launch.operands);
    return launch;
}

at::Tensor joined(const at::Tensor& first, const at::Tensor& second) { return at::cat({first, second}, -1); }

// [blocks, block_size, N, D] as [blocks, block_size, N * D]; [blocks, N * D / C0, block_size, C0] with N of 1 as
// [blocks, 1, D / C0, block_size, C0].
at::Tensor in_blocks(const In& cache, int mode) {
    return mode == kTwoCaches ? cache.raw().flatten(2) : cache.raw().unsqueeze(1);
}

DOCUMENTED("hiascend: zh/canncommercial/850/API/ascendtbapi/ascendtb_01_0314.html");
void check_latent(const In& nope, const In& rope, const In& latents, const In& ropes, const In& table, int64_t heads,
                  int64_t kv_heads, int mode, const Out& output) {
    require_dtype(nope, {at::kHalf, at::kBFloat16}, "q_nope");
    for (const In* each : {&rope, &latents, &ropes, static_cast<const In*>(&output)})
        require(each->dtype() == nope.dtype(), "q_rope, ctkv, k_rope and the output must have the dtype of q_nope");
    require(kv_heads == 1, "kv_headnum must be 1, but is " + std::to_string(kv_heads));
    int64_t tokens = nope.size(0), blocks = latents.size(0);
    require_shape(nope, {tokens, heads, kLatent}, "q_nope");
    require_shape(rope, {tokens, heads, kRope}, "q_rope");
    int64_t block = latents.dim() == 4 ? latents.size(mode == kTwoCaches ? 1 : 2) : 0;
    require(block >= 1 && block <= kMostBlock, "block_size must be at most 128, but ctkv has shape " +
                                                   shown(latents.sizes()));
    if (mode == kTwoCaches) {
        require_shape(latents, {blocks, block, 1, kLatent}, "ctkv");
        require_shape(ropes, {blocks, block, 1, kRope}, "k_rope");
    } else {
        require_shape(latents, {blocks, kLatent / 16, block, 16}, "ctkv");
        require_shape(ropes, {blocks, kRope / 16, block, 16}, "k_rope");
    }
    require_dtype(table, {at::kInt}, "block_tables");
    require(table.dim() == 2, "block_tables must have shape [batch, blocks], not " + shown(table.sizes()));
}

DOCUMENTED("hiascend: zh/canncommercial/900/API/ascendtb/ascendtb_01_0214.html");
void check_load(const In& cache, const In& rows, const In& table, const In& lengths, const char* name) {
    require_dtype(cache, {at::kHalf, at::kBFloat16, at::kChar}, name);
    require(cache.dim() == 4, std::string(name) + " must have shape [blocks, block_size, N, D], not " +
                                  shown(cache.sizes()));
    require(rows.dtype() == cache.dtype() && rows.dim() == 3 && rows.size(1) == cache.size(2) &&
                rows.size(2) == cache.size(3),
            "the result must have the dtype of its cache and shape [tokens, N, D], not " + shown(rows.sizes()));
    require_dtype(table, {at::kInt}, "block_table");
    require_dtype(lengths, {at::kInt}, "context_lens");
    require(table.dim() == 2 && lengths.dim() == 1,
            "block_table must have shape [batch, blocks], and context_lens [batch]");
}

}  // namespace

extern "C" {

Status AtbMLAGetWorkspaceSize(const aclTensor* q_nope, const aclTensor* q_rope, const aclTensor* ctkv,
                              const aclTensor* k_rope, const aclTensor* block_tables, const aclTensor* context_lens,
                              const aclTensor* mask, const aclTensor* q_lengths, const aclTensor* qk_descale,
                              const aclTensor* pv_descale, int32_t heads, float scale, int32_t kv_heads, int mask_type,
                              int calculation, uint8_t mode, aclTensor* output, aclTensor* lse, uint64_t* workspace,
                              Operation** operation, Context*) {
    return prepare("MultiLatentAttentionOperation", workspace, operation, [&] {
        if (mode != kTwoCaches && mode != kFractal) throw NotEmulated("latent attention of int8 is not emulated");
        if (mask_type == 1) throw NotEmulated("latent attention with a mask is not emulated");
        In nope(q_nope), rope(q_rope), latents = cache_of(ctkv), ropes = cache_of(k_rope), table(block_tables);
        Out out(output), sums(lse);
        check_latent(nope, rope, latents, ropes, table, heads, kv_heads, mode, out);
        auto lengths = on_host(context_lens, "context_lens"), queries = on_host(q_lengths, "qseqlen");
        if (queries.empty()) queries.assign(lengths.size(), 1);
        int64_t block = latents.size(mode == kTwoCaches ? 1 : 2);
        UNDEFINED("a kernel would read outside its inputs");
        require(queries.size() == lengths.size() && int64_t(lengths.size()) <= table.size(0) &&
                    std::accumulate(queries.begin(), queries.end(), int64_t{0}) <= nope.size(0),
                "context_lens and qseqlen must have a length for each sequence of block_tables and the rows of q_nope");
        for (auto each : lengths)
            require(each >= 0 && each <= table.size(1) * block,
                    "a length must be between 0 and " + std::to_string(table.size(1) * block) +
                        ", the tokens that block_tables has room for, but is " + std::to_string(each));
        bool wants_lse = calculation == 2;  // CALC_TYPE_RING
        auto launch = launch_on({&nope, &rope, &latents, &ropes, &table}, {&out, &sums});
        launch.run = [=, spec = calculation == 1] {
            int64_t start = 0;
            for (size_t b = 0; b < lengths.size(); start += queries[b++]) {
                auto result = out.raw().narrow(0, start, queries[b]);
                if (lengths[b] == 0 || queries[b] == 0) {
                    result.zero_();
                    continue;
                }
                auto rows = [&](const In& of) { return of.raw().narrow(0, start, queries[b]); };
                auto row = table.raw()[b];
                auto values = gather_blocks(in_blocks(latents, mode), row, 1, block, lengths[b]);
                AttentionInputs inputs{
                    .query = joined(rows(nope), rows(rope)).transpose(0, 1),
                    .key = joined(values, gather_blocks(in_blocks(ropes, mode), row, 1, block, lengths[b])),
                    .value = values,
                    .scale = scale};
                if (spec)  // the last queries of the sequence
                    inputs.hidden = outside_band(queries[b], lengths[b], int64_t{1} << 40, 0, lengths[b] - queries[b]);
                auto found = attend(inputs);
                result.copy_(found.output.transpose(0, 1));
                if (wants_lse && sums)
                    sums.raw().narrow(0, start, queries[b]).copy_(found.lse().transpose(0, 1).unsqueeze(-1));
            }
        };
        return launch;
    });
}
Status AtbMLA(void*, uint64_t, Operation* operation, Context* context) { return run(operation, context); }

Status AtbRingMLAGetWorkspaceSize(const aclTensor* q_nope, const aclTensor* q_rope, const aclTensor* k_nope,
                                  const aclTensor* k_rope, const aclTensor* value, const aclTensor* mask,
                                  const aclTensor* lengths, const aclTensor* previous_output,
                                  const aclTensor* previous_lse, int32_t heads, int32_t kv_heads, float scale,
                                  int kernel, int mask_type, int layout, int calculation, aclTensor* output,
                                  aclTensor* lse, uint64_t* workspace, Operation** operation, Context*) {
    return prepare("RingMLAOperation", workspace, operation, [&] {
        In query(q_nope), query_rope(q_rope), key(k_nope), key_rope(k_rope), values(value), before(previous_output),
            before_lse(previous_lse);
        Out out(output), sums(lse);
        DOCUMENTED("op-plugin: op_plugin/python/atb/_atb_api_docs.py");
        require_dtype(query, {at::kHalf, at::kBFloat16}, "q_nope");
        int64_t rows = query.size(0), keys = key.size(0);
        require_shape(query, {rows, heads, query.size(-1)}, "q_nope");
        require_shape(query_rope, {rows, heads, query_rope.size(-1)}, "q_rope");
        require_shape(key, {keys, kv_heads, query.size(-1)}, "k_nope");
        require_shape(key_rope, {keys, kv_heads, query_rope.size(-1)}, "k_rope");
        require_shape(values, {keys, kv_heads, values.size(-1)}, "value");
        require(kv_heads >= 1 && heads % kv_heads == 0, "head_num must be a multiple of kv_head_num");
        bool continues = calculation == 0;
        require(!continues || (before && before_lse), "calc_type_default requires pre_out and prev_lse");
        if (continues) {
            require_shape(before, out.sizes(), "pre_out");
            require_shape(before_lse, {heads, rows}, "prev_lse");
        }
        auto given = on_host(lengths, "seqlen"), key_lengths = given;
        if (lengths->shape.size() == 2) {  // [2, batch]: of queries and of keys
            key_lengths.assign(given.begin() + given.size() / 2, given.end());
            given.resize(given.size() / 2);
        }
        UNDEFINED("a kernel would read outside its inputs");
        require(std::accumulate(given.begin(), given.end(), int64_t{0}) <= rows &&
                    std::accumulate(key_lengths.begin(), key_lengths.end(), int64_t{0}) <= keys,
                "seqlen must not sum to more than the rows of the queries and keys");
        auto launch =
            launch_on({&query, &query_rope, &key, &key_rope, &values, &before, &before_lse}, {&out, &sums});
        launch.run = [=] {
            int64_t start = 0, key_start = 0;
            for (size_t b = 0; b < given.size(); start += given[b], key_start += key_lengths[b++]) {
                if (given[b] == 0) continue;
                auto own = [&](const at::Tensor& of) { return of.narrow(0, start, given[b]); };
                auto seen = [&](const In& of) { return of.raw().narrow(0, key_start, key_lengths[b]).transpose(0, 1); };
                AttentionInputs inputs{.query = joined(own(query.raw()), own(query_rope.raw())).transpose(0, 1),
                                       .key = joined(seen(key), seen(key_rope)),
                                       .value = seen(values),
                                       .scale = scale};
                if (mask_type == 1)
                    inputs.hidden =
                        outside_band(given[b], key_lengths[b], int64_t{1} << 40, 0, key_lengths[b] - given[b]);
                auto found = attend(inputs);
                auto result = found.output.transpose(0, 1), total = found.lse();  // total: [heads, queries]
                if (key_lengths[b] == 0) total = at::full_like(total, -std::numeric_limits<float>::infinity());
                if (continues) {
                    auto earlier = before_lse.raw().narrow(1, start, given[b]), both = at::logaddexp(earlier, total);
                    auto weight = [&](const at::Tensor& of) { return at::exp(of - both).t().unsqueeze(-1); };
                    result = own(before.raw()).to(at::kFloat) * weight(earlier) + result * weight(total);
                    total = both;
                }
                own(out.raw()).copy_(result);
                sums.raw().narrow(1, start, given[b]).copy_(total);
            }
        };
        return launch;
    });
}
Status AtbRingMLA(void*, uint64_t, Operation* operation, Context* context) { return run(operation, context); }

Status AtbPagedCacheLoadGetWorkspaceSize(const aclTensor* key_cache, const aclTensor* value_cache,
                                         const aclTensor* block_table, const aclTensor* context_lens, aclTensor* key,
                                         aclTensor* value, const aclTensor* seq_starts, int8_t format, bool sums,
                                         bool has_starts, uint64_t* workspace, Operation** operation, Context*) {
    return prepare("PagedCacheLoadOperation", workspace, operation, [&] {
        if (format != 1) throw NotEmulated("PagedCacheLoadOperation of caches in FRACTAL_NZ is not emulated");
        In keys(key_cache), values(value_cache), table(block_table), lengths(context_lens), starts(seq_starts);
        Out key_rows(key), value_rows(value);
        check_load(keys, key_rows, table, lengths, "key_cache");
        check_load(values, value_rows, table, lengths, "value_cache");
        auto launch = launch_on({&keys, &values, &table, &lengths, &starts}, {&key_rows, &value_rows});
        launch.run = [=] {
            auto given = lengths.raw().to(at::kLong);
            if (sums) given = given.diff();
            int64_t block = keys.size(1), first = 0;
            for (int64_t b = 0; b < given.size(0); ++b) {
                int64_t length = given[b].item<int64_t>();
                int64_t start = has_starts ? starts.raw()[b].item<int64_t>() : 0;
                if (length == 0) continue;
                for (auto [cache, rows] : {std::pair{&keys, &key_rows}, std::pair{&values, &value_rows}}) {
                    auto found = gather_blocks(cache->raw().flatten(2), table.raw()[b], cache->size(2), block,
                                               start + length);  // [N, tokens, D]
                    rows->raw().narrow(0, first, length).copy_(found.narrow(1, start, length).transpose(0, 1));
                }
                first += length;
            }
        };
        return launch;
    });
}
Status AtbPagedCacheLoad(void*, uint64_t, Operation* operation, Context* context) { return run(operation, context); }

Status AtbSelfAttentionPrefixEncoderGetWorkspaceSize(const aclTensor* query, const aclTensor* key,
                                                     const aclTensor* value, const aclTensor* block_tables,
                                                     const aclTensor* mask, const aclTensor* lengths,
                                                     const aclTensor* key_lengths, const aclTensor*, int mask_type,
                                                     int32_t heads, int32_t kv_heads, float scale, aclTensor* output,
                                                     uint64_t* workspace, Operation** operation, Context*) {
    return prepare("SelfAttentionOperation", workspace, operation, [&] {
        return self_attention({.query = query,
                               .key = key,
                               .value = value,
                               .table = block_tables,
                               .mask = mask,
                               .output = output,
                               .queries = on_host(lengths, "seqlen"),
                               .keys = on_host(key_lengths, "kv_seqlen"),
                               .heads = heads,
                               .kv_heads = kv_heads ? kv_heads : heads,
                               .scale = scale,
                               .mask_type = mask_type,
                               .paged = true,
                               .precise = true});
    });
}
Status AtbSelfAttentionPrefixEncoder(void*, uint64_t, Operation* operation, Context* context) {
    return run(operation, context);
}

Status AtbFusedAddTopkDivGetWorkspaceSize(const aclTensor* x, const aclTensor* add_num, const aclTensor* mapping_num,
                                          const aclTensor* mapping_table, int64_t groups, int64_t kept_groups,
                                          int64_t summed, int64_t k, int activation, bool normalizes, float scale,
                                          bool maps, aclTensor* y, aclTensor* indices, uint64_t* workspace,
                                          Operation** operation, Context*) {
    return prepare("FusedAddTopkDivOperation", workspace, operation, [&] {
        In logits(x), bias(add_num), counts(mapping_num), experts(mapping_table);
        Out weights(y), chosen(indices);
        DOCUMENTED("op-plugin: op_plugin/python/atb/_atb_api_docs.py");
        require_dtype(logits, {at::kHalf, at::kBFloat16, at::kFloat}, "x");
        require(bias.dtype() == logits.dtype(), "add_num must have the dtype of x");
        int64_t tokens = logits.size(0), count = logits.size(-1);
        require_shape(logits, {tokens, count}, "x");
        require_shape(bias, {count}, "add_num");
        require(groups >= 1 && count % groups == 0, "group_num must divide the number of experts");
        require(kept_groups >= 1 && kept_groups <= groups && summed >= 1 && summed <= count / groups && k >= 1 &&
                    k <= count,
                "group_topk, n and k must be between 1 and the numbers of groups, of a group's experts and of experts");
        require(!maps || (counts && experts), "enable_expert_mapping requires mapping_num and mapping_table");
        auto launch = launch_on({&logits, &bias, &counts, &experts}, {&weights, &chosen});
        launch.run = [=] {
            auto scores = at::sigmoid(logits.raw().to(at::kFloat));
            auto grouped = (scores + bias.raw().to(at::kFloat)).unflatten(1, {groups, -1});
            auto totals = std::get<0>(grouped.topk(summed)).sum(-1);
            auto losers = std::get<1>(totals.sort(/*stable=*/true, 1, /*descending=*/true)).slice(1, kept_groups);
            auto lost = at::zeros(totals.sizes(), at::kBool).scatter_(1, losers, true).unsqueeze(-1);
            auto ranked = std::get<1>(grouped.masked_fill(lost, 0).flatten(1).sort(/*stable=*/true, 1, true));
            auto best = ranked.narrow(1, 0, k), found = scores.gather(1, best);
            if (normalizes) found = found / found.sum(1, true) * scale;
            weights.set(found);
            if (maps) {  // expert e of token t has its replica t modulo their number
                auto rows = at::arange(tokens, at::kLong).unsqueeze(1);
                auto replica = rows.remainder(counts.raw().to(at::kLong).clamp_min(1).index({best}));
                best = experts.raw().index({best, replica});
            }
            chosen.set(best);
        };
        return launch;
    });
}
Status AtbFusedAddTopkDiv(void*, uint64_t, Operation* operation, Context* context) { return run(operation, context); }

}  // extern "C"

}  // namespace atb
