// Attention of one new token per sequence over a paged cache.
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
    int mask;                  // 0: none
    bool batch_run_status;     // skips sequences by their batch status
    int quantized;             // 0: not quantized
    aclDataType output_dtype;  // with quantized input
    bool quantization_offset;
    int compress, calculation, scaling;  // 0: default
    int layout;                          // 0: BSND
    uint32_t latent_value_dim;           // 0: separate key and value
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

class PagedAttention : public EmulatedOperation {
  public:
    explicit PagedAttention(const infer::PagedAttentionParam& parameters)
        : EmulatedOperation("PagedAttentionOperation", 5, 1, 4096),
          heads_(parameters.heads),
          kv_heads_(parameters.kv_heads ? parameters.kv_heads : parameters.heads),
          scale_(parameters.scale) {}

  private:
    Launch bind(const VariantPack& pack) const override {
        aclTensor handles[4], output_handle = handle_of(pack.outputs[0]);
        for (int i = 0; i < 4; ++i) handles[i] = handle_of(pack.inputs[i]);
        In query(&handles[0]), key(&handles[1]), value(&handles[2]), table(&handles[3]);
        Out output(&output_handle);
        Caches caches{.fractal = pack.inputs[1].desc.format == ACL_FORMAT_FRACTAL_NZ, .kv_heads = kv_heads_};
        check(query, key, value, table, output, caches);
        int64_t block = caches.block_size(key);
        auto lengths = lengths_of(pack.inputs[4], query.size(0), table.size(1) * block);
        Launch launch;
        for (auto* in : {&query, &key, &value, &table}) in->describe(launch.operands);
        output.describe(launch.operands);
        for (auto length : lengths)
            launch.flops += attention_flops(heads_, 1, length, query.size(2), caches.dim(value));
        // Captures by value, because a replay may run after the operation was destroyed.
        launch.run = [query, key, value, table, output, caches, block, lengths, scale = scale_] {
            auto keys = caches.in_blocks(key.raw()), values = caches.in_blocks(value.raw());
            for (size_t b = 0; b < lengths.size(); ++b) {
                auto out = output.raw()[b];
                if (lengths[b] == 0) {
                    out.zero_();
                    continue;
                }
                auto row = table.raw()[b];
                AttentionInputs inputs{.query = query.raw()[b].unsqueeze(1),
                                       .key = gather_blocks(keys, row, caches.kv_heads, block, lengths[b]),
                                       .value = gather_blocks(values, row, caches.kv_heads, block, lengths[b]),
                                       .scale = scale};
                out.copy_(attend(inputs).output.squeeze(1));
            }
        };
        return launch;
    }

    void check(const In& query, const In& key, const In& value, const In& table, const In& output,
               const Caches& caches) const {
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
        if (table.dtype() != at::kInt || table.dim() != 2 || table.size(0) != query.size(0))
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
        if (!tensor.host_data) throw Refused("context_lens must be a CPU tensor");
        if (tensor.desc.dtype != ACL_INT32 || Utils::GetTensorNumel(tensor) != static_cast<uint64_t>(batch))
            throw Refused("context_lens must be int32, with one length for each of the " + std::to_string(batch) +
                          " sequences");
        auto* first = static_cast<const int32_t*>(tensor.host_data);
        for (int64_t b = 0; b < batch; ++b)
            if (first[b] < 0 || first[b] > most)
                throw Refused("context_lens[" + std::to_string(b) + "] is " + std::to_string(first[b]) +
                              ", but must be between 0 and " + std::to_string(most) +
                              ", the tokens that block_table has room for");
        return {first, first + batch};
    }

    int64_t heads_, kv_heads_;
    double scale_;
};

}  // namespace

template <>
Status CreateOperation<infer::PagedAttentionParam>(const infer::PagedAttentionParam& parameters,
                                                   Operation** operation) {
    if (parameters.mask || parameters.batch_run_status || parameters.quantized || parameters.compress ||
        parameters.calculation || parameters.scaling || parameters.layout || parameters.latent_value_dim)
        throw NotEmulated(
            "ATB's PagedAttentionOperation with a mask, quantization, compression, speculative decoding or latent "
            "attention is not emulated");
    *operation = new PagedAttention(parameters);
    return 0;
}

}  // namespace atb
