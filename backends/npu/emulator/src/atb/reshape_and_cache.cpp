// Writes keys and values to the slots of a paged cache.
#include "operation.h"
#include "ops/cache.h"

DOCUMENTED("ascend-transformer-boost: src/ops/ops_infer/reshape_and_cache/reshape_and_cache_operation.cpp");

namespace atb {

namespace infer {
struct ReshapeAndCacheParam {
    int compress;  // 0: none
    int caches;    // 0: both, in ND; 1: the key's alone; 2: both, in FRACTAL_NZ
    uint8_t reserved[16];
};
}  // namespace infer

namespace {

using namespace emulator;

class ReshapeAndCache : public EmulatedOperation {
  public:
    explicit ReshapeAndCache(bool fractal)
        : EmulatedOperation("ReshapeAndCacheOperation", 5, 2, 0), fractal_(fractal) {}

  private:
    Launch bind(const VariantPack& pack) const override {
        aclTensor handles[5];
        for (int i = 0; i < 5; ++i) handles[i] = handle_of(pack.inputs[i]);
        In key(&handles[0]), value(&handles[1]), slots(&handles[4]);
        InOut key_cache(&handles[2]), value_cache(&handles[3]);
        check(key, key_cache, "key");
        check(value, value_cache, "value");
        if (value.size(0) != key.size(0) || value.size(1) != key.size(1))
            throw Refused("key and value must have as many tokens and heads");
        if (!fractal_ && value.dtype() != key.dtype()) throw Refused("key and value must have one dtype");
        int block = fractal_ ? 2 : 1;
        if (value_cache.size(0) != key_cache.size(0) || value_cache.size(block) != key_cache.size(block))
            throw Refused("both caches must have the same blocks");
        if (slots.dtype() != at::kInt)
            throw Refused(std::string("slots must be int32, not ") + c10::toString(slots.dtype()));
        check_slots(slots, key.size(0));
        Launch launch;
        for (auto* in : {&key, &value, &slots}) in->describe(launch.operands);
        for (auto* cache : {&key_cache, &value_cache}) cache->describe(launch.operands);
        // Everything by value: the operation may be gone when a captured launch is replayed.
        launch.run = [key, value, key_cache, value_cache, slots, fractal = fractal_] {
            auto rows = [&](const InOut& cache) {
                return fractal ? rows_of_fractal_blocks(cache.raw()) : rows_of_blocks(cache.raw());
            };
            write_slots(rows(key_cache), key, slots);
            write_slots(rows(value_cache), value, slots);
        };
        return launch;
    }

    // Source: ascend-transformer-boost, master of July 2026, src/ops/ops_infer/reshape_and_cache/
    // reshape_and_cache_operation.cpp (DimCheck, KVCacheDimCheck910B, KVCacheDimCheck910BNZ),
    // src/kernels/mixkernels/reshape_and_cache/reshape_and_cache_operation.cpp, and ops_configs/atb_ops_info.ini. On no
    // product do they take a cache of 3 dimensions, heads and head dimension in one.
    void check(const In& rows, const In& cache, const char* name) const {
        std::string what = name;
        if (rows.dim() != 3 || cache.dim() != 4)
            throw Refused(what + " must be [tokens, heads, head dimension], and its cache have 4 dimensions");
        if (rows.dtype() != cache.dtype()) throw Refused(what + " and its cache must have one dtype");
        auto dtype = rows.dtype();
        bool takes_int8 = !fractal_ || what == "key";
        if (dtype != at::kHalf && dtype != at::kBFloat16 && !(dtype == at::kChar && takes_int8))
            throw Refused(what + " must be float16" + (takes_int8 ? ", bfloat16 or int8" : " or bfloat16") + ", not " +
                          c10::toString(dtype));
        if (fractal_ && (cache.size(3) != (dtype == at::kChar ? 32 : 16) || cache.size(2) % 16))
            throw Refused("the cache of " + what +
                          " must end with tiles of 16 elements, or of 32 in int8, and its block_size be a multiple of "
                          "16");
        bool fits = fractal_ ? cache.size(1) * cache.size(3) == rows.size(1) * rows.size(2)
                             : cache.size(2) == rows.size(1) && cache.size(3) == rows.size(2);
        if (!fits)
            throw Refused("the cache of " + what + " must be " +
                          (fractal_ ? "[blocks, heads * dimension / C0, block_size, C0]"
                                    : "[blocks, block_size, heads, dimension]"));
    }

    bool fractal_;
};

}  // namespace

template <>
Status CreateOperation<infer::ReshapeAndCacheParam>(const infer::ReshapeAndCacheParam& parameters,
                                                    Operation** operation) {
    if (parameters.compress || parameters.caches == 1)
        throw NotEmulated(
            "ATB's ReshapeAndCacheOperation with compression or without a value cache is not emulated");
    *operation = new ReshapeAndCache(parameters.caches == 2);
    return 0;
}

}  // namespace atb
