// Attention of new tokens over a paged cache: one for each sequence, or several with their lengths.
#include <numeric>

#include "operation.h"
#include "ops/attention_core.h"
#include "ops/attention_layout.h"

DOCUMENTED(
    "ascend-transformer-boost: src/ops/ops_infer/paged_attention/paged_attention_operation.cpp"
    "; ascend-transformer-boost: src/kernels/mixkernels/pagedattention/tiling/paged_attention_tiling.cpp");

namespace atb {

namespace infer {
struct PagedAttentionParam {
    int32_t heads;
    float scale;
    int32_t kv_heads;
    int mask;                  // 0: none; 2: ALiBi; 3: of several tokens
    bool batch_run_status;     // skips sequences by their batch status
    int quantized;             // 0: not quantized
    aclDataType output_dtype;  // with quantized input
    bool quantization_offset;
    int compress;
    int calculation;  // 0: one token for each sequence; 1: several
    int scaling;
    int layout;                 // 0: BSND
    uint32_t latent_value_dim;  // 0: separate key and value; otherwise the values are the first elements of the keys
    uint8_t reserved[68];
};
}  // namespace infer

namespace {

using namespace emulator;

// Every limit here is from ascend-transformer-boost, master of July 2026: src/ops/ops_infer/paged_attention/
// paged_attention_operation.cpp (KVCacheDimCheck910B, KVCacheDimCheck310P) and src/kernels/mixkernels/pagedattention/
// (paged_attention_operation.cpp, tiling/paged_attention_tiling.cpp).
constexpr int64_t kMaxDim = 576, kLargeDim = 256, kMaxDimTimesBlock = 128 * 128;

// In ND [blocks, block_size, N, D]; in FRACTAL_NZ [blocks, N * D / C0, block_size, C0].
struct Caches {
    bool fractal;
    int64_t kv_heads;
    int64_t block_size(const In& cache) const { return cache.size(fractal ? 2 : 1); }
    int64_t dim(const In& cache) const { return (fractal ? cache.size(1) : cache.size(2)) * cache.size(3) / kv_heads; }
    // Returns the layout that gather_blocks takes: [blocks, block_size, N * D], or [blocks, N, D / C0, block_size, C0].
    at::Tensor in_blocks(const at::Tensor& cache) const {
        return fractal ? cache.unflatten(1, {kv_heads, cache.size(1) / kv_heads}) : cache.flatten(2);
    }
};

constexpr int kPagedAlibi = 2, kSeveralMasks = 3;

class PagedAttention : public EmulatedOperation {
  public:
    explicit PagedAttention(const infer::PagedAttentionParam& parameters)
        : EmulatedOperation("PagedAttentionOperation",
                            5 - (parameters.latent_value_dim > 0) + (parameters.mask != 0) + parameters.calculation, 1,
                            4096),
          heads_(parameters.heads),
          kv_heads_(parameters.kv_heads ? parameters.kv_heads : parameters.heads),
          scale_(parameters.scale),
          latent_(parameters.latent_value_dim),
          mask_(parameters.mask),
          several_(parameters.calculation == 1) {}

  private:
    Launch bind(const VariantPack& pack) const override {
        int next = 2 + (latent_ == 0);  // the place of the block table
        aclTensor handles[6], output_handle = handle_of(pack.outputs[0]);
        for (int i = 0; i <= next; ++i) handles[i] = handle_of(pack.inputs[i]);
        if (mask_) handles[5] = handle_of(pack.inputs[next + 2]);
        In query(&handles[0]), key(&handles[1]), value(&handles[latent_ ? 1 : 2]), table(&handles[next]);
        In mask(mask_ ? &handles[5] : nullptr);
        Out output(&output_handle);
        Caches caches{.fractal = pack.inputs[1].desc.format == ACL_FORMAT_FRACTAL_NZ, .kv_heads = kv_heads_};
        int64_t sequences = several_ && table.dim() == 2 ? table.size(0) : query.size(0);
        check(query, key, value, table, output, caches, sequences);
        int64_t block = caches.block_size(key);
        auto lengths = lengths_of(pack.inputs[next + 1], sequences, table.size(1) * block);
        std::vector<int64_t> queries(sequences, 1);
        if (several_) queries = queries_of(pack.inputs[next + 2 + (mask_ != 0)], lengths, query.size(0));
        if (mask_) check_mask(mask, query, lengths);
        Launch launch;
        for (auto* in : {&query, &key, &value, &table, &mask})
            if (*in && !(latent_ && in == &value)) in->describe(launch.operands);
        output.describe(launch.operands);
        for (size_t b = 0; b < lengths.size(); ++b)
            launch.flops += attention_flops(heads_, queries[b], lengths[b], query.size(2), output.size(2));
        // Captures by value, because a replay may run after the operation was destroyed.
        launch.run = [query, key, value, table, mask, output, caches, block, lengths, queries, scale = scale_,
                      latent = latent_, several = several_] {
            auto keys = caches.in_blocks(key.raw()), values = caches.in_blocks(value.raw());
            int64_t start = 0;
            for (size_t b = 0; b < lengths.size(); start += queries[b++]) {
                auto out = output.raw().narrow(0, start, queries[b]);
                if (lengths[b] == 0 || queries[b] == 0) {
                    out.zero_();
                    continue;
                }
                auto row = table.raw()[b];
                AttentionInputs inputs{.query = query.raw().narrow(0, start, queries[b]).transpose(0, 1),
                                       .key = gather_blocks(keys, row, caches.kv_heads, block, lengths[b]),
                                       .value = gather_blocks(values, row, caches.kv_heads, block, lengths[b]),
                                       .scale = scale};
                if (latent) inputs.value = inputs.value.narrow(2, 0, latent);
                if (mask) {  // of ALiBi: [batch, heads, 1, S] or [heads, 1, S]; of several tokens: [tokens, S]
                    auto all = mask.raw();
                    auto own = several ? all.narrow(0, start, queries[b]) : all.dim() == 4 ? all[b] : all;
                    inputs.bias = own.narrow(-1, 0, lengths[b]);
                }
                out.copy_(attend(inputs).output.transpose(0, 1));
            }
        };
        return launch;
    }

    void check_mask(const In& mask, const In& query, const std::vector<int64_t>& lengths) const {
        int64_t longest = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
        if (mask.dtype() != query.dtype())
            throw Refused("mask must have the query's dtype, " + c10::str(query.dtype(), ", not ", mask.dtype()));
        std::vector<int64_t> wanted{query.size(0), heads_, 1};
        if (several_) wanted = {query.size(0)};
        if (!several_ && mask.dim() == 3) wanted.erase(wanted.begin());
        bool fits = mask.dim() == int64_t(wanted.size()) + 1 && mask.sizes().slice(0, wanted.size()) == wanted;
        if (!fits || mask.size(-1) < longest)
            throw Refused("mask must have shape " +
                          std::string(several_ ? "[tokens, S]" : "[batch, num_heads, 1, S] or [num_heads, 1, S]") +
                          " with S at least the longest sequence, " + std::to_string(longest) + ", not " +
                          c10::str(mask.sizes()));
    }

    // The numbers of queries of the sequences, in host memory like their lengths.
    static std::vector<int64_t> queries_of(const Tensor& tensor, const std::vector<int64_t>& lengths, int64_t rows) {
        auto queries = host_numbers(tensor, "seq_len");
        UNDEFINED("a kernel would read outside its inputs");
        if (queries.size() != lengths.size() || std::accumulate(queries.begin(), queries.end(), int64_t{0}) > rows)
            throw Refused("seq_len must have a length for each of the " + std::to_string(lengths.size()) +
                          " sequences, with a sum of at most the query's " + std::to_string(rows) + " rows");
        return queries;
    }

    void check(const In& query, const In& key, const In& value, const In& table, const In& output,
               const Caches& caches, int64_t sequences) const {
        auto dtype = query.dtype();
        if (dtype != at::kHalf && dtype != at::kBFloat16)
            throw Refused(std::string("query must be float16 or bfloat16, not ") + c10::toString(dtype));
        if (key.dtype() != dtype || value.dtype() != dtype || output.dtype() != dtype)
            throw Refused("query, key_cache, value_cache and out must have the same dtype, but are " +
                          c10::str(dtype, ", ", key.dtype(), ", ", value.dtype(), " and ", output.dtype()));
        if (query.dim() != 3 || query.size(1) != heads_)
            throw Refused("query must have shape [batch, num_heads, D] with num_heads " + std::to_string(heads_) +
                          ", not " + c10::str(query.sizes()));
        if (kv_heads_ < 1 || heads_ % kv_heads_)
            throw Refused("num_heads, " + std::to_string(heads_) + ", must be a multiple of num_kv_heads, " +
                          std::to_string(kv_heads_));
        if (key.dim() != 4 || value.dim() != 4)
            throw Refused("key_cache and value_cache must have 4 dimensions, not " + std::to_string(key.dim()) +
                          " and " + std::to_string(value.dim()));
        int64_t dim = query.size(2), value_dim = caches.dim(value), block = caches.block_size(key);
        if (caches.dim(key) != dim || (!caches.fractal && key.size(2) != kv_heads_))
            throw Refused("key_cache must have shape [blocks, block_size, num_kv_heads, D], not " +
                          c10::str(key.sizes()));
        if (caches.block_size(value) != block || value.size(0) != key.size(0))
            throw Refused(
                "key_cache and value_cache must have the same number of blocks and block_size, but have shapes " +
                c10::str(key.sizes(), " and ", value.sizes()));
        if (!caches.fractal && value.size(2) != kv_heads_)
            throw Refused("value_cache must have shape [blocks, block_size, num_kv_heads, D of the values], not " +
                          c10::str(value.sizes()));
        if (block < 1 || block % 16)
            throw Refused("block_size must be a multiple of 16, but is " + std::to_string(block));
        if (caches.fractal)
            check_fractals(dim, value_dim, block);
        else
            check_widths(dim, value_dim, block);
        if (latent_ && (latent_ > value_dim || caches.fractal))
            throw Refused("mla_vheadsize must be at most the head dimension of a cache in ND, " +
                          std::to_string(value_dim) + ", but is " + std::to_string(latent_));
        if (latent_) value_dim = latent_;
        if (table.dtype() != at::kInt || table.dim() != 2 || table.size(0) != sequences)
            throw Refused("block_table must be int32 of shape [batch, blocks], not " +
                          c10::str(table.dtype(), " of shape ", table.sizes()));
        if (output.sizes() != at::IntArrayRef({query.size(0), heads_, value_dim}))
            throw Refused("out must have shape [batch, num_heads, D of the values], not " + c10::str(output.sizes()));
    }

    // Limits of caches in ND, on Atlas A2 and A3.
    static void check_widths(int64_t dim, int64_t value_dim, int64_t block) {
        std::string found = ", but D of the keys is " + std::to_string(dim) + ", D of the values " +
                            std::to_string(value_dim) + ", block_size " + std::to_string(block);
        int64_t widest = std::max(dim, value_dim);
        if (widest > kMaxDim) throw Refused("the head dimensions must be at most 576" + found);
        if (widest > kLargeDim) {
            if (block > 128) throw Refused("block_size must be at most 128 with a head dimension above 256" + found);
        } else if (dim == kLargeDim && value_dim == kLargeDim && block >= 128) {
            if (block % 128) throw Refused("block_size must be a multiple of 128 with head dimensions of 256" + found);
        } else if (dim == value_dim && dim * block > kMaxDimTimesBlock) {
            throw Refused("D * block_size must be at most 16384" + found);
        }
    }

    // Limits of caches in FRACTAL_NZ, which only the Atlas inference products (310P) take.
    static void check_fractals(int64_t dim, int64_t value_dim, int64_t block) {
        if (dim != value_dim || dim % 16 || dim > kLargeDim || dim * block > kMaxDimTimesBlock)
            throw Refused(
                "in FRACTAL_NZ, D must be the same for keys and values, a multiple of 16 and at most 256, and D * "
                "block_size at most 16384, but D of the keys is " +
                std::to_string(dim) + ", D of the values " + std::to_string(value_dim) + ", block_size " +
                std::to_string(block));
    }

    // Reads the lengths on the host at the call. The launch keeps a copy.
    static std::vector<int64_t> lengths_of(const Tensor& tensor, int64_t batch, int64_t most) {
        auto lengths = host_numbers(tensor, "context_lens");
        if (lengths.size() != static_cast<uint64_t>(batch))
            throw Refused("context_lens must be int32, with one length for each of the " + std::to_string(batch) +
                          " sequences");
        for (int64_t b = 0; b < batch; ++b)
            if (lengths[b] < 0 || lengths[b] > most)
                throw Refused("context_lens[" + std::to_string(b) + "] is " + std::to_string(lengths[b]) +
                              ", but must be between 0 and " + std::to_string(most) +
                              ", the tokens that block_table has room for");
        return lengths;
    }

    int64_t heads_, kv_heads_;
    double scale_;
    int64_t latent_;
    int mask_;
    bool several_;
};

}  // namespace

template <>
Status CreateOperation<infer::PagedAttentionParam>(const infer::PagedAttentionParam& parameters,
                                                   Operation** operation) {
    bool several = parameters.calculation == 1;
    if (parameters.mask && parameters.mask != (several ? kSeveralMasks : kPagedAlibi))
        throw NotEmulated("a mask of type " + std::to_string(parameters.mask) +
                          " of ATB's PagedAttentionOperation is not emulated");
    if (parameters.batch_run_status || parameters.quantized || parameters.compress || parameters.calculation > 1 ||
        parameters.scaling || parameters.layout)
        throw NotEmulated(
            "ATB's PagedAttentionOperation with quantization, compression, log-n scaling or the layout BNSD is not "
            "emulated");
    *operation = new PagedAttention(parameters);
    return 0;
}

}  // namespace atb
