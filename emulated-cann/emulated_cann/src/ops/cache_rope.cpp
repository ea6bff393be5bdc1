// Fused RMS norm, rotary embedding and write to the key-value cache.
#include "cache.h"
#include "norm.h"
#include "rope.h"

namespace {

using namespace emulator;


DOCUMENTED(
    "ops-transformer: posembedding/qkv_rms_norm_rope_cache/docs/aclnnQkvRmsNormRopeCache.md"
    "; ops-transformer: posembedding/kv_rms_norm_rope_cache/docs/aclnnKvRmsNormRopeCache.md");
void check_dtypes(const In& x, std::initializer_list<const In*> others) {
    if (x.dtype() != at::kHalf && x.dtype() != at::kBFloat16)
        throw Refused(std::string("the input must be float16 or bfloat16, not ") + c10::toString(x.dtype()));
    for (auto* other : others)
        if (other->dtype() != x.dtype())
            throw Refused("gamma, cos, sin and caches must have the input's dtype, " +
                          c10::str(x.dtype(), ", not ", other->dtype()));
}

void check_unquantized(std::initializer_list<const In*> scales) {
    for (auto* scale : scales)
        if (*scale) throw NotEmulated("a quantized cache is not emulated");
}

DOCUMENTED("ops-transformer: posembedding/qkv_rms_norm_rope_cache/docs/aclnnQkvRmsNormRopeCache.md");
// Queries and keys are normalized per head, then rotated. Values are stored unchanged.
void check_qkv(In qkv, In q_gamma, In k_gamma, In cos, In sin, In slots, InOut q_out, InOut k_cache, InOut v_cache,
               In k_scale, In v_scale, In k_offset, In v_offset, Ints qkv_size, Ints heads, double, Text mode, Out, Out,
               Out) {
    check_unquantized({&k_scale, &v_scale, &k_offset, &v_offset});
    check_dtypes(qkv, {&q_gamma, &k_gamma, &cos, &sin, &q_out, &k_cache, &v_cache});
    if (mode.value != "PA_NZ") throw Refused("cache_mode must be PA_NZ, not '" + mode.value + "'");
    if (qkv.dim() != 2 || qkv_size.size() != 4 || heads.size() != 3)
        throw Refused(
            "qkv must have shape [tokens, H], qkv_size the entries [B, S, N, D] and head_nums the entries [Nq, Nk, "
            "Nv]");
    int64_t tokens = qkv.size(0), dim = qkv_size[3], all = heads[0] + heads[1] + heads[2];
    if (qkv_size[0] * qkv_size[1] != tokens || qkv_size[2] != all || all * dim != qkv.size(1))
        throw Refused("qkv_size and head_nums must agree with qkv: B * S = " + number(tokens) +
                      ", N = Nq + Nk + Nv, N * D = " + number(qkv.size(1)));
    if (dim != 128) throw Refused("D must be 128, but is " + number(dim));
    if (heads[1] != heads[2])
        throw Refused("the numbers of key and value heads must be equal, but are " + number(heads[1]) + " and " +
                      number(heads[2]));
    if (q_gamma.dim() != 1 || q_gamma.size(0) != dim || k_gamma.dim() != 1 || k_gamma.size(0) != dim)
        throw Refused("q_gamma and k_gamma must have shape [D], not " +
                      c10::str(q_gamma.sizes(), " and ", k_gamma.sizes()));
    if (cos.dim() != 2 || cos.size(0) != tokens || cos.size(1) != dim || sin.sizes() != cos.sizes())
        throw Refused("cos and sin must have shape [tokens, D], not " + c10::str(cos.sizes(), " and ", sin.sizes()));
    if (slots.dtype() != at::kLong)
        throw Refused(std::string("index must be int64, not ") + c10::toString(slots.dtype()));
    check_slots(slots, tokens);
    if (q_out.dim() != 2 || q_out.size(0) != tokens || q_out.size(1) != heads[0] * dim)
        throw Refused("q_out must have shape [tokens, Nq * D], not " + c10::str(q_out.sizes()));
    for (auto* cache : {&k_cache, &v_cache})
        if (cache->dim() != 4 || cache->size(3) != 16 || cache->size(1) * 16 != heads[1] * dim)
            throw Refused("k_cache and v_cache must have shape [blocks, Nk * D / 16, block_size, 16], not " +
                          c10::str(cache->sizes()));
    int64_t block = k_cache.size(2), needed = (qkv_size[1] + block - 1) / block * qkv_size[0];
    if (k_cache.size(0) < needed)
        throw Refused("k_cache and v_cache must have at least ceil(S / block_size) * B = " + number(needed) +
                      " blocks, but have " + number(k_cache.size(0)));
}

void QkvRmsNormRopeCache(In qkv, In q_gamma, In k_gamma, In cos, In sin, In slots, InOut q_out, InOut k_cache,
                         InOut v_cache, In k_scale, In v_scale, In k_offset, In v_offset, Ints qkv_size, Ints heads,
                         double epsilon, Text mode, Out q_before, Out k_before, Out v_before) {
    int64_t tokens = qkv.size(0), dim = qkv_size[3];
    auto parts = qkv.tensor().unflatten(1, {-1, dim}).split_with_sizes({heads[0], heads[1], heads[2]}, 1);
    auto cosine = cos.tensor().unsqueeze(1), sine = sin.tensor().unsqueeze(1);
    auto rotated = [&](const at::Tensor& part, const In& gamma) {
        return rotate(rms_normalize(part, gamma, epsilon).values, cosine, sine, false)
            .view({tokens, part.size(1) * dim})
            .to(qkv.dtype());
    };
    auto query = rotated(parts[0], q_gamma), key = rotated(parts[1], k_gamma),
         value = parts[2].reshape({tokens, heads[2] * dim});
    q_out.set(query);
    write_slots(rows_of_fractal_blocks(k_cache.raw().view(k_cache.sizes())), key, slots);
    write_slots(rows_of_fractal_blocks(v_cache.raw().view(v_cache.sizes())), value, slots);
    q_before.set(query);
    k_before.set(key);
    v_before.set(value);
}

DOCUMENTED(
    "ops-transformer: posembedding/kv_rms_norm_rope_cache/docs/aclnnKvRmsNormRopeCache.md"
    "; ops-transformer: posembedding/kv_rms_norm_rope_cache/op_host/kv_rms_norm_rope_cache_ds_tiling.cpp (the widths)"
    "; op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_kv_rmsnorm_rope_cache.md (the number of blocks)");
// For multi-head latent attention. The first part of kv is normalized; the second, whose pairs are adjacent, is
// rotated.
void check_kv(In kv, In gamma, In cos, In sin, In index, InOut k_cache, InOut c_cache, In k_scale, In c_scale,
              In k_offset, In c_offset, double, Text mode, bool, Out, Out) {
    check_unquantized({&k_scale, &c_scale, &k_offset, &c_offset});
    check_dtypes(kv, {&gamma, &cos, &sin, &k_cache, &c_cache});
    if (kv.dim() != 4 || kv.size(1) != 1 || kv.size(3) != 576)
        throw Refused("kv must have shape [B, 1, S, 576], not " + c10::str(kv.sizes()));
    if (gamma.dim() != 1 || gamma.size(0) != 512)
        throw Refused("gamma must have shape [512], not " + c10::str(gamma.sizes()));
    if (cos.dim() != 4 || cos.size(0) != kv.size(0) || (cos.size(2) != kv.size(2) && cos.size(2) != 1) ||
        cos.size(3) != 64 || sin.sizes() != cos.sizes())
        throw Refused("cos and sin must have shape [B, 1, S or 1, 64], not " +
                      c10::str(cos.sizes(), " and ", sin.sizes()));
    if (index.dtype() != at::kLong)
        throw Refused(std::string("index must be int64, not ") + c10::toString(index.dtype()));
    if (mode.value == "Norm") {
        if (index.dim() != 2 || index.size(0) != kv.size(0) || index.size(1) != kv.size(2))
            throw Refused("index must have shape [B, S] with cache_mode Norm, not " + c10::str(index.sizes()));
        if (k_cache.size(0) != kv.size(0))
            throw Refused("with cache_mode Norm, the caches must have shape [B, 1, length, D], not " +
                          c10::str(k_cache.sizes()));
    } else if (mode.value == "PA" || mode.value == "PA_BNSD" || mode.value == "PA_NZ") {
        check_slots(index, kv.size(0) * kv.size(2));
    } else {
        throw NotEmulated("cache_mode " + mode.value + " is not emulated; Norm, PA, PA_BNSD and PA_NZ are");
    }
    for (auto [cache, dim] : {std::pair{&k_cache, int64_t{64}}, {&c_cache, int64_t{512}}})
        if (cache->dim() != 4 || cache->size(3) != dim || !cache->raw().is_contiguous())
            throw Refused(
                "k_cache and ckv_cache must be contiguous, with 4 dimensions, the last of 64 and 512 elements, but one "
                "has shape " +
                c10::str(cache->sizes()));
    if (mode.value == "Norm") return;
    int64_t block = k_cache.size(1), needed = (kv.size(2) + block - 1) / block * kv.size(0);
    if (block % 16 || c_cache.size(1) != block)
        throw Refused("the caches must have blocks of equally many tokens, a multiple of 16, but have " +
                      number(block) + " and " + number(c_cache.size(1)));
    if (k_cache.size(0) < needed)
        throw Refused("the caches must have at least ceil(S / block_size) * B = " + number(needed) +
                      " blocks, but have " + number(k_cache.size(0)));
}

at::Tensor kv_cache_rows(const In& cache, const Text& mode) {
    auto raw = cache.raw();
    if (mode.value == "Norm")
        return raw.view({raw.size(0), raw.size(2), 1, raw.size(3)});  // each sequence is one block
    if (mode.value != "PA_NZ") return rows_of_blocks(raw);
    return rows_of_fractal_blocks(raw.view({raw.size(0), raw.size(3) / 16, raw.size(1), 16}));
}

void KvRmsNormRopeCache(In kv, In gamma, In cos, In sin, In index, InOut k_cache, InOut c_cache, In k_scale, In c_scale,
                        In k_offset, In c_offset, double epsilon, Text mode, bool output_kv, Out k_rope, Out c_kv) {
    auto parts = kv.tensor().split_with_sizes({512, 64}, 3);
    auto normalized = rms_normalize(parts[0], gamma, epsilon).values.to(kv.dtype());
    auto key = rotate(parts[1].unflatten(-1, {32, 2}).transpose(-1, -2).flatten(-2), cos, sin, false).to(kv.dtype());
    auto slots = index.tensor();
    if (mode.value == "Norm") {  // positions within each sequence
        auto first = at::arange(kv.size(0), at::kLong).unsqueeze(1) * k_cache.size(2);
        slots = at::where(slots < 0, slots, slots + first);
    }
    write_slots(kv_cache_rows(k_cache, mode), key.reshape({-1, 64}), slots);
    write_slots(kv_cache_rows(c_cache, mode), normalized.reshape({-1, 512}), slots);
    if (!output_kv) return;
    k_rope.set(key);
    c_kv.set(normalized);
}

}  // namespace

ACLNN(QkvRmsNormRopeCache, .check = check_qkv)
ACLNN(KvRmsNormRopeCache, .check = check_kv)
