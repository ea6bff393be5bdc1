// The projections, norms, rotations and cache writes before latent attention.
#include "cache.h"
#include "grouped.h"
#include "norm.h"
#include "numeric.h"
#include "quantize.h"
#include "rope.h"

namespace {

using namespace emulator;

constexpr int64_t kLatent = 512, kRope = 64;

// The arguments that both versions of the operation share.
struct Prolog {
    In x, down, up, up_key, down_key, query_gamma, key_gamma, sin, cos;
    InOut latents, ropes;
    In slots, x_scale, down_scale, up_scale, down_key_scale, smooth;
    double query_epsilon, key_epsilon, query_factor, key_factor;
    std::string mode;
    int64_t quantization;  // 0: none; 1: of weight_uq_qr; 2: of x and all weights
    Out query, query_rope, query_norm, query_norm_scale;
    int64_t tokens() const { return x.dim() == 3 ? x.size(0) * x.size(1) : x.size(0); }
    int64_t heads() const { return up_key.size(0); }
};

bool is_one_of(int64_t value, std::initializer_list<int64_t> allowed) {
    for (auto each : allowed)
        if (each == value) return true;
    return false;
}

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_mla_prolog_v3.md");
void check_weight(const In& weight, at::IntArrayRef shape, bool quantized, const char* name) {
    require_dtype(weight, {quantized ? at::kChar : at::kBFloat16}, name);
    require_shape(weight, shape, name);
    require(weight.format() == ACL_FORMAT_FRACTAL_NZ, std::string(name) + " must be in FRACTAL_NZ");
}

void check_cache(const Prolog& call, const In& cache, int64_t width, const char* name) {
    require_dtype(cache, {at::kBFloat16}, name);
    require(cache.raw().is_contiguous(), std::string(name) + " must be contiguous");
    if (call.mode == "TND") return require_shape(cache, {call.tokens(), 1, width}, name);
    if (call.mode == "BSND") return require_shape(cache, {call.x.size(0), call.x.size(1), 1, width}, name);
    require(cache.dim() == 4 && cache.size(2) == 1 && cache.size(3) == width,
            std::string(name) + " must have shape [blocks, block_size, 1, " + text(width) + "], not " +
                shown(cache.sizes()));
    int64_t block = cache.size(1);
    require(cache.raw().numel() == 0 || (block >= 16 && block <= 1024 && block % 16 == 0),
            "block_size must be a multiple of 16 from 16 to 1024, but is " + text(block));
}

void check(const Prolog& call) {
    require(product_line("MlaProlog") != Line::inference, "it is not for " + soc_name());
    bool merged = call.x.dim() == 2, all = call.quantization == 2;
    require(merged || call.x.dim() == 3, "token_x must have shape [T, He] or [B, S, He], not " + shown(call.x.sizes()));
    require_dtype(call.x, {all ? at::kChar : at::kBFloat16}, "token_x");
    int64_t width = call.x.size(-1), low = call.down.size(-1), tokens = call.tokens(), heads = call.heads();
    require(is_one_of(width, {1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192}),
            "He must be 1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680 or 8192, but is " + text(width));
    require(is_one_of(low, {1536, 2048}), "Hcq must be 1536 or 2048, but is " + text(low));
    require(is_one_of(heads, {1, 2, 4, 8, 16, 32, 64, 128}),
            "the number of heads must be a power of 2 up to 128, but is " + text(heads));
    int64_t dim = call.up_key.dim() == 3 ? call.up_key.size(1) : 0;
    require(is_one_of(dim, {128, 192}), "D must be 128 or 192, but weight_uk has shape " + shown(call.up_key.sizes()));
    require_dtype(call.up_key, {at::kBFloat16}, "weight_uk");
    require_shape(call.up_key, {heads, dim, kLatent}, "weight_uk");
    check_weight(call.down, {width, low}, all, "weight_dq");
    check_weight(call.up, {low, heads * (dim + kRope)}, call.quantization > 0, "weight_uq_qr");
    check_weight(call.down_key, {width, kLatent + kRope}, all, "weight_dkv_kr");
    for (auto [gamma, size] : {std::pair{&call.query_gamma, low}, {&call.key_gamma, kLatent}}) {
        require_dtype(*gamma, {at::kBFloat16}, "rmsnorm_gamma");
        require_shape(*gamma, {size}, "rmsnorm_gamma");
    }
    auto rotary = call.x.sizes().vec();
    rotary.back() = kRope;
    for (const In* each : {&call.sin, &call.cos}) {
        require_dtype(*each, {at::kBFloat16}, "rope_sin and rope_cos");
        require_shape(*each, rotary, "rope_sin and rope_cos");
    }
    if (call.mode == "PA_BLK_BSND" || call.mode == "PA_BLK_NZ")
        throw NotEmulated("cache_mode " + call.mode + " is not emulated; PA_BSND, PA_NZ, BSND and TND are");
    bool paged = call.mode == "PA_BSND" || call.mode == "PA_NZ";
    require(paged || call.mode == (merged ? "TND" : "BSND"),
            "cache_mode must be PA_BSND, PA_NZ, PA_BLK_BSND, PA_BLK_NZ, TND for token_x of 2 dimensions or BSND for 3, "
            "not " + call.mode);
    check_cache(call, call.latents, kLatent, "kv_cache");
    check_cache(call, call.ropes, kRope, "kr_cache");
    require(!paged || bool(call.slots), "PA_BSND and PA_NZ require cache_index");
    if (paged) {
        require_dtype(call.slots, {at::kLong}, "cache_index");
        rotary.pop_back();
        require_shape(call.slots, rotary, "cache_index");
    }
    require(call.quantization == 0 || call.up_scale, "a quantized weight_uq_qr requires dequant_scale_w_uq_qr");
    require(!all || (call.x_scale && call.down_scale && call.down_key_scale),
            "quantized weights require dequant_scale_x, dequant_scale_w_dq and dequant_scale_w_dkv_kr");
    for (auto [scale, rows, columns] :
         {std::tuple{&call.x_scale, tokens, int64_t{1}}, {&call.down_scale, int64_t{1}, low},
          {&call.up_scale, int64_t{1}, heads * (dim + kRope)}, {&call.down_key_scale, int64_t{1}, kLatent + kRope},
          {&call.smooth, int64_t{1}, low}}) {
        require_dtype(*scale, {at::kFloat}, "the scales");
        require_shape(*scale, {rows, columns}, "the scales");
    }
}

// Writes a row for each token.
void write(const Prolog& call, const InOut& cache, const at::Tensor& rows) {
    auto raw = cache.raw();
    if (raw.numel() == 0) return;
    if (!call.slots || call.mode == "BSND" || call.mode == "TND") return cache.set(rows.reshape(cache.sizes()));
    if (call.mode == "PA_NZ")
        raw = rows_of_fractal_blocks(raw.view({raw.size(0), raw.size(3) / 16, raw.size(1), 16}));
    write_slots(raw, rows.to(cache.dtype()), call.slots);
}

void run(const Prolog& call) {
    int64_t tokens = call.tokens(), heads = call.heads(), dim = call.up_key.size(1);
    if (tokens == 0) return;
    auto x = call.x.raw().reshape({tokens, -1});
    auto product = [&](const In& weight, const In& scale) {
        auto matrix = weight.tensor();
        if (call.quantization < 2) return at::matmul(x.to(at::kFloat), matrix.to(at::kFloat));
        return integer_product(x, matrix).to(at::kFloat) * call.x_scale.raw() * scale.raw();
    };
    auto low = rms_normalize(product(call.down, call.down_scale), call.query_gamma.raw().to(at::kFloat),
                             call.query_epsilon)
                   .values;
    at::Tensor queries;
    if (call.quantization == 0) {
        call.query_norm.set(low.reshape(call.query_norm ? call.query_norm.sizes() : low.sizes()));
        queries = at::matmul(low, call.up.tensor().to(at::kFloat));
    } else {
        auto smoothed = call.smooth ? low * call.smooth.raw() : low;
        auto scales = smoothed.abs().amax(-1, true) / 127;
        auto rounded = at::where(scales == 0, 0, smoothed / scales).round().clamp(-128, 127);
        call.query_norm.set(rounded.reshape(call.query_norm ? call.query_norm.sizes() : rounded.sizes()));
        call.query_norm_scale.set(scales);
        queries = integer_product(rounded, call.up.tensor()).to(at::kFloat) * scales * call.up_scale.raw();
    }
    queries = (queries * call.query_factor).view({tokens, heads, dim + kRope});
    auto cos = call.cos.raw().reshape({tokens, 1, kRope}), sin = call.sin.raw().reshape({tokens, 1, kRope});
    auto rotated = [&](const at::Tensor& part) {  // adjacent elements are pairs; afterwards halves are
        return rotate(part.unflatten(-1, {kRope / 2, 2}).transpose(-1, -2).flatten(-2), cos, sin, false);
    };
    auto absorbed = at::matmul(queries.narrow(2, 0, dim).transpose(0, 1), call.up_key.raw().to(at::kFloat));
    call.query.set(absorbed.transpose(0, 1).reshape(call.query.sizes()));
    call.query_rope.set(rotated(queries.narrow(2, dim, kRope)).reshape(call.query_rope.sizes()));
    auto keys = product(call.down_key, call.down_key_scale);
    auto latents = rms_normalize(keys.narrow(1, 0, kLatent), call.key_gamma.raw().to(at::kFloat), call.key_epsilon);
    write(call, call.latents, latents.values * call.key_factor);
    write(call, call.ropes, rotated(keys.narrow(1, kLatent, kRope).unsqueeze(1)).squeeze(1));
}

void only_plain_caches(int64_t mode, const In& latent_scale, const In& rope_scale) {
    if (mode != 0 || latent_scale || rope_scale) throw NotEmulated("a quantized cache is not emulated");
}

#define V3_PARAMETERS                                                                                               \
    In x, In down, In up, In up_key, In down_key, In query_gamma, In key_gamma, In sin, In cos, InOut latents,      \
        InOut ropes, In slots, In x_scale, In down_scale, In up_scale, In down_key_scale, In latent_scale,          \
        In rope_scale, In smooth, In lengths, In clip, double query_epsilon, double key_epsilon, Text mode,         \
        int64_t quantization, int64_t cache_quantization, int64_t query_quantization, int64_t repository,           \
        int64_t scale_repository, int64_t tile, double query_factor, double key_factor,                             \
        Out query, Out query_rope, Out query_scale, Out query_norm, Out query_norm_scale

#define V3_CALL                                                                                                     \
    Prolog {                                                                                                        \
        x, down, up, up_key, down_key, query_gamma, key_gamma, sin, cos, latents, ropes, slots, x_scale,            \
            down_scale, up_scale, down_key_scale, smooth, query_epsilon, key_epsilon, query_factor, key_factor,     \
            mode.value, quantization, query, query_rope, query_norm, query_norm_scale                               \
    }

void check_v3(V3_PARAMETERS) {
    if (quantization > 2) throw NotEmulated("weights of 8-bit floating point are not emulated");
    only_plain_caches(cache_quantization, latent_scale, rope_scale);
    if (query_quantization || repository || scale_repository || clip)
        throw NotEmulated("a quantized query and joined caches are not emulated");
    check(V3_CALL);
}

void MlaPrologV3WeightNz(V3_PARAMETERS) { run(V3_CALL); }

// The second version has no modes: the dtypes of x and weight_uq_qr tell how the weights are quantized.
#define V2_PARAMETERS                                                                                               \
    In x, In down, In up, In up_key, In down_key, In query_gamma, In key_gamma, In sin, In cos, In slots,           \
        InOut latents, InOut ropes, In x_scale, In down_scale, In up_scale, In down_key_scale, In latent_scale,     \
        In rope_scale, In smooth, double query_epsilon, double key_epsilon, Text mode, Out query, Out query_rope,   \
        Out query_scale

#define V2_CALL                                                                                                     \
    Prolog {                                                                                                        \
        x, down, up, up_key, down_key, query_gamma, key_gamma, sin, cos, latents, ropes, slots, x_scale,            \
            down_scale, up_scale, down_key_scale, smooth, query_epsilon, key_epsilon, 1, 1, mode.value,             \
            x.dtype() == at::kChar ? 2 : up.dtype() == at::kChar, query, query_rope, Out(nullptr), Out(nullptr)     \
    }

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_mla_prolog_v2.md");
void check_v2(V2_PARAMETERS) {
    only_plain_caches(0, latent_scale, rope_scale);
    require(mode.value == "PA_BSND" || mode.value == "PA_NZ", "cache_mode must be PA_BSND or PA_NZ, not " + mode.value);
    require(x.size(-1) == 7168, "He must be 7168, but is " + text(x.size(-1)));
    require(down.size(-1) == 1536, "Hcq must be 1536, but is " + text(down.size(-1)));
    require(x.dim() != 3 || x.size(1) <= 16, "S must be at most 16, but is " + text(x.size(1)));
    check(V2_CALL);
    int64_t block = latents.size(1);
    require(latents.raw().numel() == 0 || block == 16 || block == 128,
            "block_size must be 16 or 128, but is " + text(block));
}

void MlaPrologV2WeightNz(V2_PARAMETERS) { run(V2_CALL); }

}  // namespace

ACLNN(MlaPrologV3WeightNz, .check = check_v3)
ACLNN(MlaPrologV2WeightNz, .check = check_v2)
