// Writes keys and values to the slots of a paged cache.
#include "operation.h"
#include "ops/cache.h"

DOCUMENTED("ascend-transformer-boost: src/ops/ops_infer/reshape_and_cache/reshape_and_cache_operation.cpp");

namespace atb {

namespace infer {
struct ReshapeAndCacheParam {
    int compress;  // 0: none
    int caches;    // 0: key and value in ND; 1: only the key; 2: key and value in FRACTAL_NZ
    uint8_t reserved[16];
};
}  // namespace infer

namespace {

using namespace emulator;

class ReshapeAndCache : public EmulatedOperation {
  public:
    explicit ReshapeAndCache(bool fractal, bool only_key)
        : EmulatedOperation("ReshapeAndCacheOperation", only_key ? 3 : 5, only_key ? 1 : 2, 0),
          fractal_(fractal),
          only_key_(only_key) {}

  private:
    Launch bind(const VariantPack& pack) const override {
        int parts = only_key_ ? 1 : 2;  // the rows, their caches, and the slots
        aclTensor handles[5];
        for (int i = 0; i < 2 * parts + 1; ++i) handles[i] = handle_of(pack.inputs[i]);
        In key(&handles[0]), slots(&handles[2 * parts]), value(only_key_ ? nullptr : &handles[1]);
        InOut key_cache(&handles[parts]), value_cache(only_key_ ? nullptr : &handles[3]);
        check(key, key_cache, "key");
        if (value) check_value(key, value, key_cache, value_cache);
        if (slots.dtype() != at::kInt)
            throw Refused(std::string("slots must be int32, not ") + c10::toString(slots.dtype()));
        check_slots(slots, key.size(0));
        Launch launch;
        for (auto* in : {&key, &value, &slots})
            if (*in) in->describe(launch.operands);
        for (auto* cache : {&key_cache, &value_cache})
            if (*cache) cache->describe(launch.operands);
        // Captures by value, because a replay may run after the operation was destroyed.
        launch.run = [key, value, key_cache, value_cache, slots, fractal = fractal_] {
            auto rows = [&](const InOut& cache) {
                return fractal ? rows_of_fractal_blocks(cache.raw()) : rows_of_blocks(cache.raw());
            };
            write_slots(rows(key_cache), key, slots);
            if (value) write_slots(rows(value_cache), value, slots);
        };
        return launch;
    }

    void check_value(const In& key, const In& value, const In& key_cache, const In& value_cache) const {
        check(value, value_cache, "value");
        if (value.size(0) != key.size(0) || value.size(1) != key.size(1))
            throw Refused("key and value must have the same number of tokens and heads, but have shapes " +
                          c10::str(key.sizes(), " and ", value.sizes()));
        if (!fractal_ && value.dtype() != key.dtype())
            throw Refused("key and value must have the same dtype, but are " +
                          c10::str(key.dtype(), " and ", value.dtype()));
        int block = fractal_ ? 2 : 1;
        if (value_cache.size(0) != key_cache.size(0) || value_cache.size(block) != key_cache.size(block))
            throw Refused(
                "key_cache and value_cache must have the same number of blocks and block_size, but have shapes " +
                c10::str(key_cache.sizes(), " and ", value_cache.sizes()));
    }

    // From ascend-transformer-boost, master of July 2026: src/ops/ops_infer/reshape_and_cache/
    // reshape_and_cache_operation.cpp (DimCheck, KVCacheDimCheck910B, KVCacheDimCheck910BNZ),
    // src/kernels/mixkernels/reshape_and_cache/reshape_and_cache_operation.cpp, and ops_configs/atb_ops_info.ini. No
    // product takes a cache of 3 dimensions that joins heads and head dimension.
    void check(const In& rows, const In& cache, const char* name) const {
        std::string what = name;
        if (rows.dim() != 3 || cache.dim() != 4)
            throw Refused(
                what +
                " must have shape [tokens, heads, head dimension] and its cache 4 dimensions, but they have shapes " +
                c10::str(rows.sizes(), " and ", cache.sizes()));
        if (rows.dtype() != cache.dtype())
            throw Refused(what + " and its cache must have the same dtype, but are " +
                          c10::str(rows.dtype(), " and ", cache.dtype()));
        auto dtype = rows.dtype();
        bool takes_int8 = !fractal_ || what == "key";
        if (dtype != at::kHalf && dtype != at::kBFloat16 && !(dtype == at::kChar && takes_int8))
            throw Refused(what + " must be float16" + (takes_int8 ? ", bfloat16 or int8" : " or bfloat16") + ", not " +
                          c10::toString(dtype));
        if (fractal_ && (cache.size(3) != (dtype == at::kChar ? 32 : 16) || cache.size(2) % 16))
            throw Refused(what +
                          "_cache must have a last dimension of 16, or 32 in int8, and a block_size that is a multiple "
                          "of 16, but has shape " +
                          c10::str(cache.sizes()));
        bool fits = fractal_ ? cache.size(1) * cache.size(3) == rows.size(1) * rows.size(2)
                             : cache.size(2) == rows.size(1) && cache.size(3) == rows.size(2);
        if (!fits)
            throw Refused(what + "_cache must have shape " +
                          (fractal_ ? "[blocks, heads * dimension / C0, block_size, C0]"
                                    : "[blocks, block_size, heads, dimension]") +
                          ", not " + c10::str(cache.sizes()));
    }

    bool fractal_, only_key_;
};

}  // namespace

template <>
Status CreateOperation<infer::ReshapeAndCacheParam>(const infer::ReshapeAndCacheParam& parameters,
                                                    Operation** operation) {
    if (parameters.compress) throw NotEmulated("ATB's ReshapeAndCacheOperation with compression is not emulated");
    *operation = new ReshapeAndCache(parameters.caches == 2, parameters.caches == 1);
    return 0;
}

}  // namespace atb
