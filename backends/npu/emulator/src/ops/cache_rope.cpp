// Norm, rotary embedding and the write to the cache in one.
#include "cache.h"
#include "norm.h"
#include "rope.h"

namespace {

using namespace emulator;

std::string number(int64_t value) { return std::to_string(value); }

DOCUMENTED(
    "ops-transformer: posembedding/qkv_rms_norm_rope_cache/docs/aclnnQkvRmsNormRopeCache.md"
    "; ops-transformer: posembedding/kv_rms_norm_rope_cache/docs/aclnnKvRmsNormRopeCache.md");
void check_dtypes(const In& x, std::initializer_list<const In*> others) {
    if (x.dtype() != at::kHalf && x.dtype() != at::kBFloat16) throw Refused("the input must be float16 or bfloat16");
    for (auto* other : others)
        if (other->dtype() != x.dtype()) throw Refused("input, gamma, cos, sin and caches must have one dtype");
}

void check_unquantised(std::initializer_list<const In*> scales) {
    for (auto* scale : scales)
        if (*scale) throw NotEmulated("a quantised cache is not emulated");
}

DOCUMENTED("ops-transformer: posembedding/qkv_rms_norm_rope_cache/docs/aclnnQkvRmsNormRopeCache.md");
// queries and keys are normalised head by head, then turned; values are stored as they are.
void check_qkv(In qkv, In q_gamma, In k_gamma, In cos, In sin, In slots, InOut q_out, InOut k_cache, InOut v_cache,
               In k_scale, In v_scale, In k_offset, In v_offset, Ints qkv_size, Ints heads, double, Text mode, Out, Out,
               Out) {
    check_unquantised({&k_scale, &v_scale, &k_offset, &v_offset});
    check_dtypes(qkv, {&q_gamma, &k_gamma, &cos, &sin, &q_out, &k_cache, &v_cache});
    if (mode.value != "PA_NZ") throw Refused("cache_mode must be PA_NZ, not " + mode.value);
    if (qkv.dim() != 2 || qkv_size.size() != 4 || heads.size() != 3)
        throw Refused("qkv must be [tokens, H], qkv_size [B, S, N, D] and head_nums [Nq, Nk, Nv]");
    int64_t tokens = qkv.size(0), dim = qkv_size[3], all = heads[0] + heads[1] + heads[2];
    if (qkv_size[0] * qkv_size[1] != tokens || qkv_size[2] != all || all * dim != qkv.size(1))
        throw Refused("qkv_size and head_nums must describe qkv: B * S = " + number(tokens) +
                      ", N = Nq + Nk + Nv, N * D = " + number(qkv.size(1)));
    if (dim != 128) throw Refused("D must be 128, but is " + number(dim));
    if (heads[1] != heads[2]) throw Refused("there must be as many value heads as key heads");
    if (q_gamma.dim() != 1 || q_gamma.size(0) != dim || k_gamma.dim() != 1 || k_gamma.size(0) != dim)
        throw Refused("q_gamma and k_gamma must be [D]");
    if (cos.dim() != 2 || cos.size(0) != tokens || cos.size(1) != dim || sin.sizes() != cos.sizes())
        throw Refused("cos and sin must be [tokens, D]");
    if (slots.dtype() != at::kLong) throw Refused("index must be int64");
    check_slots(slots, tokens);
    if (q_out.dim() != 2 || q_out.size(0) != tokens || q_out.size(1) != heads[0] * dim)
        throw Refused("q_out must be [tokens, Nq * D]");
    for (auto* cache : {&k_cache, &v_cache})
        if (cache->dim() != 4 || cache->size(3) != 16 || cache->size(1) * 16 != heads[1] * dim)
            throw Refused("the caches must be [blocks, Nk * D / 16, block_size, 16]");
    int64_t block = k_cache.size(2), needed = (qkv_size[1] + block - 1) / block * qkv_size[0];
    if (k_cache.size(0) < needed)
        throw Refused("the caches have " + number(k_cache.size(0)) + " blocks, fewer than ceil(S / block_size) * B = " +
                      number(needed));
}

void QkvRmsNormRopeCache(In qkv, In q_gamma, In k_gamma, In cos, In sin, In slots, InOut q_out, InOut k_cache,
                         InOut v_cache, In k_scale, In v_scale, In k_offset, In v_offset, Ints qkv_size, Ints heads,
                         double epsilon, Text mode, Out q_before, Out k_before, Out v_before) {
    int64_t tokens = qkv.size(0), dim = qkv_size[3];
    auto parts = qkv.tensor().unflatten(1, {-1, dim}).split_with_sizes({heads[0], heads[1], heads[2]}, 1);
    auto cosine = cos.tensor().unsqueeze(1), sine = sin.tensor().unsqueeze(1);
    auto turned = [&](const at::Tensor& part, const In& gamma) {
        return rotate(rms_normalise(part, gamma, epsilon).values, cosine, sine, false)
            .view({tokens, part.size(1) * dim})
            .to(qkv.dtype());
    };
    auto query = turned(parts[0], q_gamma), key = turned(parts[1], k_gamma), value = parts[2].reshape({tokens, heads[2] * dim});
    q_out.set(query);
    write_slots(rows_of_fractal_blocks(k_cache.raw().view(k_cache.sizes())), key, slots);
    write_slots(rows_of_fractal_blocks(v_cache.raw().view(v_cache.sizes())), value, slots);
    q_before.set(query);
    k_before.set(key);
    v_before.set(value);
}

DOCUMENTED(
    "ops-transformer: posembedding/kv_rms_norm_rope_cache/docs/aclnnKvRmsNormRopeCache.md"
    "; ops-transformer: posembedding/kv_rms_norm_rope_cache/op_host/kv_rms_norm_rope_cache_ds_tiling.cpp (the widths)");
// Multi-head latent attention's: the first part of kv is normalised, the second, whose neighbours are pairs, turned.
void check_kv(In kv, In gamma, In cos, In sin, In index, InOut k_cache, InOut c_cache, In k_scale, In c_scale,
              In k_offset, In c_offset, double, Text mode, bool, Out, Out) {
    check_unquantised({&k_scale, &c_scale, &k_offset, &c_offset});
    check_dtypes(kv, {&gamma, &cos, &sin, &k_cache, &c_cache});
    if (kv.dim() != 4 || kv.size(1) != 1 || kv.size(3) != 576) throw Refused("kv must be [B, 1, S, 576]");
    if (gamma.dim() != 1 || gamma.size(0) != 512) throw Refused("gamma must be [512]");
    if (cos.dim() != 4 || cos.size(0) != kv.size(0) || (cos.size(2) != kv.size(2) && cos.size(2) != 1) ||
        cos.size(3) != 64 || sin.sizes() != cos.sizes())
        throw Refused("cos and sin must be [B, 1, S or 1, 64]");
    if (index.dtype() != at::kLong) throw Refused("index must be int64");
    if (mode.value == "Norm") {
        if (index.dim() != 2 || index.size(0) != kv.size(0) || index.size(1) != kv.size(2))
            throw Refused("index must be [B, S] with cache_mode Norm");
        if (k_cache.size(0) != kv.size(0)) throw Refused("with cache_mode Norm the caches must be [B, 1, length, D]");
    } else if (mode.value == "PA" || mode.value == "PA_BNSD" || mode.value == "PA_NZ") {
        check_slots(index, kv.size(0) * kv.size(2));
    } else {
        throw NotEmulated("cache_mode " + mode.value + " is not emulated: Norm, PA, PA_BNSD and PA_NZ are");
    }
    for (auto [cache, dim] : {std::pair{&k_cache, int64_t{64}}, {&c_cache, int64_t{512}}})
        if (cache->dim() != 4 || cache->size(3) != dim || !cache->raw().is_contiguous())
            throw Refused("the caches must be contiguous, of 4 dimensions, and end with 64 and 512");
}

at::Tensor kv_cache_rows(const In& cache, const Text& mode) {
    auto raw = cache.raw();
    if (mode.value == "Norm") return raw.view({raw.size(0), raw.size(2), 1, raw.size(3)});  // a sequence is a block
    if (mode.value != "PA_NZ") return rows_of_blocks(raw);
    return rows_of_fractal_blocks(raw.view({raw.size(0), raw.size(3) / 16, raw.size(1), 16}));
}

void KvRmsNormRopeCache(In kv, In gamma, In cos, In sin, In index, InOut k_cache, InOut c_cache, In k_scale, In c_scale,
                        In k_offset, In c_offset, double epsilon, Text mode, bool output_kv, Out k_rope, Out c_kv) {
    auto parts = kv.tensor().split_with_sizes({512, 64}, 3);
    auto normalised = rms_normalise(parts[0], gamma, epsilon).values.to(kv.dtype());
    auto key = rotate(parts[1].unflatten(-1, {32, 2}).transpose(-1, -2).flatten(-2), cos, sin, false).to(kv.dtype());
    auto slots = index.tensor();
    if (mode.value == "Norm") {  // positions within each sequence
        auto first = at::arange(kv.size(0), at::kLong).unsqueeze(1) * k_cache.size(2);
        slots = at::where(slots < 0, slots, slots + first);
    }
    write_slots(kv_cache_rows(k_cache, mode), key.reshape({-1, 64}), slots);
    write_slots(kv_cache_rows(c_cache, mode), normalised.reshape({-1, 512}), slots);
    if (!output_kv) return;
    k_rope.set(key);
    c_kv.set(normalised);
}

}  // namespace

ACLNN(QkvRmsNormRopeCache, .check = check_qkv)
ACLNN(KvRmsNormRopeCache, .check = check_kv)
