// Rotary position embeddings.
#include "rope.h"

#include <algorithm>
#include <array>

namespace emulator {

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool interleaved) {
    auto wide = x.to(at::kFloat);
    at::Tensor rotated;
    if (interleaved) {
        rotated = at::stack({-wide.slice(-1, 1, {}, 2), wide.slice(-1, 0, {}, 2)}, -1).flatten(-2);
    } else {
        auto halves = wide.chunk(2, -1);
        rotated = at::cat({-halves[1], halves[0]}, -1);
    }
    return wide * cos.to(at::kFloat) + rotated * sin.to(at::kFloat);
}

}  // namespace emulator

namespace {

using namespace emulator;


DOCUMENTED(
    "ops-transformer: posembedding/rotary_position_embedding/docs/aclnnRotaryPositionEmbeddingV2.md"
    "; ops-transformer: posembedding/apply_rotary_pos_emb/docs/aclnnApplyRotaryPosEmbV2.md"
    "; ops-transformer: posembedding/interleave_rope/docs/aclnnInterleaveRope.md");
void check_factors(const In& x, const In& cos, const In& sin) {
    if (cos.sizes() != sin.sizes() || cos.dtype() != sin.dtype())
        throw Refused(
            "cos and sin must have the same shape and dtype, but are " +
            c10::str(cos.dtype(), " of shape ", cos.sizes(), " and ", sin.dtype(), " of shape ", sin.sizes()));
    if (cos.dtype() != x.dtype())
        throw Refused("cos and sin must have the input's dtype, " + c10::str(x.dtype(), ", not ", cos.dtype()));
    if (cos.dim() != x.dim())
        throw Refused("cos and sin must have as many dimensions as the input, " + number(x.dim()) + ", but have " +
                      number(cos.dim()));
}

DOCUMENTED(
    "ops-transformer: posembedding/rotary_position_embedding/docs/aclnnRotaryPositionEmbedding.md"
    "; ops-transformer: posembedding/rotary_position_embedding/docs/aclnnRotaryPositionEmbeddingV2.md");
void check_rotary(In x, In cos, In sin, int64_t mode, In matrix, Out) {
    check_factors(x, cos, sin);
    if (x.dim() != 3 && x.dim() != 4) throw Refused("the input must have 3 or 4 dimensions, not " + number(x.dim()));
    if (matrix) throw NotEmulated("rotate (a rotation matrix) is not emulated");
    if (mode != 0 && mode != 1)
        throw Refused("the rotary mode must be 0 (half) or 1 (interleave), not " + number(mode));
    int64_t dim = x.size(-1);
    if (dim % 2 || dim >= 896) throw Refused("the head dimension must be even and below 896, but is " + number(dim));
    if (cos.size(-1) != dim)
        throw Refused("cos and sin must have the input's last dimension, " + number(dim) + ", but have " +
                      number(cos.size(-1)));
    for (int64_t d = 0; d < x.dim(); ++d)
        if (cos.size(d) != 1 && cos.size(d) != x.size(d))
            throw Refused("dimension " + number(d) + " of cos and sin must be 1 or the input's, " + number(x.size(d)) +
                          ", but is " + number(cos.size(d)));
}

void RotaryPositionEmbeddingV2(In x, In cos, In sin, int64_t mode, In matrix, Out y) {
    y.set(rotate(x, cos, sin, mode == 1));
}

// Values of the argument layout.
enum : int64_t { kBsnd = 1, kTnd = 4 };

constexpr int64_t kUnifiedBuffer = 192 * 1024;

DOCUMENTED("ops-transformer: posembedding/apply_rotary_pos_emb/docs/aclnnApplyRotaryPosEmbV2.md");
void check_apply(InOut query, InOut key, In cos, In sin, int64_t layout, Text mode) {
    check_factors(query, cos, sin);
    if (layout != kBsnd && layout != kTnd)
        throw Refused("layout must be 1 (BSND) or 4 (TND) on this device, but is " + number(layout));
    if (mode.value != "half") throw Refused("rotary_mode must be 'half' on this device, not '" + mode.value + "'");
    int64_t dims = layout == kTnd ? 3 : 4, dim = query.size(-1);
    if (query.dim() != dims || key.dim() != dims)
        throw Refused("query and key must have " + number(dims) + " dimensions, not " + number(query.dim()) + " and " +
                      number(key.dim()));
    if (key.dtype() != query.dtype())
        throw Refused("query and key must have the same dtype, but are " +
                      c10::str(query.dtype(), " and ", key.dtype()));
    if ((dim != 64 && dim != 128) || key.size(-1) != dim)
        throw Refused("the head dimension of query and key must be 64 or 128, but is " + number(dim) + " and " +
                      number(key.size(-1)));
    // The bytes that a token's heads take in the unified buffer, by the documents' formula.
    int64_t size = c10::elementSize(query.dtype()), cast = query.dtype() == at::kBFloat16, computed = cast ? 4 : size;
    int64_t needed = 5 * (query.size(-2) + key.size(-2)) * dim * computed + 4 * dim * size + cast * 8 * dim;
    if (needed > kUnifiedBuffer)
        throw Refused("the heads of query and key must fit into the unified buffer of " + number(kUnifiedBuffer) +
                      " bytes, but take " + number(needed));
    for (int64_t d = 0; d < dims - 2; ++d)
        if (key.size(d) != query.size(d) || cos.size(d) != query.size(d))
            throw Refused("dimension " + number(d) + " of query, key, cos and sin must be the same, but is " +
                          number(query.size(d)) + ", " + number(key.size(d)) + ", " + number(cos.size(d)) + " and " +
                          number(sin.size(d)));
    if (cos.size(-2) != 1 || cos.size(-1) != dim)
        throw Refused("the last dimensions of cos and sin must be [1, " + number(dim) + "], but the shape is " +
                      c10::str(cos.sizes()));
}

void ApplyRotaryPosEmbV2(InOut query, InOut key, In cos, In sin, int64_t layout, Text mode) {
    query.set(rotate(query, cos, sin, false));
    key.set(rotate(key, cos, sin, false));
}

DOCUMENTED("ops-transformer: posembedding/interleave_rope/docs/aclnnInterleaveRope.md");
void check_interleave(In x, In cos, In sin, Out) {
    check_factors(x, cos, sin);
    if (x.dim() != 4 || x.size(-1) != 64 || cos.size(-1) != 64)
        throw Refused("x, cos and sin must have shape [B, N, S, 64], not " +
                      c10::str(x.sizes(), ", ", cos.sizes(), " and ", sin.sizes()));
    if (cos.size(1) != 1) throw Refused("cos and sin must have N = 1, not " + number(cos.size(1)));
    if (cos.size(0) != x.size(0) || (cos.size(2) != 1 && cos.size(2) != x.size(2)))
        throw Refused("cos and sin must have x's B, and x's S or 1, but have shape " +
                      c10::str(cos.sizes(), " for x of shape ", x.sizes()));
}

// Moves even and odd elements to halves before the rotation. The output keeps this order.
void InterleaveRope(In x, In cos, In sin, Out y) {
    y.set(rotate(x.tensor().unflatten(-1, {32, 2}).transpose(-1, -2).flatten(-2), cos, sin, false));
}

// Returns cos and sin of each token, [tokens, 1, rotary_dim / 2], from one row of positions or composed of sections of
// several rows.
std::pair<at::Tensor, at::Tensor> position_factors(const In& positions, const In& cache, const Ints& section,
                                                   bool interleaved) {
    auto rows = cache.tensor().to(at::kFloat).index_select(0, positions.tensor().reshape(-1).to(at::kLong));
    auto parts = rows.chunk(2, -1);
    if (positions.dim() == 1) return {parts[0].unsqueeze(1), parts[1].unsqueeze(1)};
    auto piece = [&](const at::Tensor& part) {
        auto sources = part.view({positions.size(0), positions.size(1), -1});
        if (interleaved) {
            auto mixed = sources[0].clone();
            for (int64_t i = 1; i <= 2; ++i)
                mixed.slice(1, i, section[i] * 3, 3).copy_(sources[i].slice(1, i, section[i] * 3, 3));
            return mixed.unsqueeze(1);
        }
        std::vector<at::Tensor> pieces;
        int64_t start = 0;
        for (size_t i = 0; i < section.size(); start += section[i++])
            pieces.push_back(sources[i].narrow(1, start, section[i]));
        return at::cat(pieces, -1).unsqueeze(1);
    };
    return {piece(parts[0]), piece(parts[1])};
}

// The supported values of mrope_section.
constexpr std::array<std::array<int64_t, 4>, 5> kSections = {
    {{16, 24, 24, 0}, {24, 20, 20, 0}, {8, 12, 12, 0}, {11, 11, 10, 0}, {16, 16, 16, 16}}};

// From aclnnRopeWithSinCosCacheV2.md of ops-transformer (CANN 9.1) and, where it is silent, the operation's op_host: a
// first section above 0 requires several rows of positions, and otherwise cache_mode has no effect. The document of
// npu_mrope allows only the default cache_mode there, but op-plugin's test_npu_mrope.py runs both on Ascend910B.
DOCUMENTED("ops-transformer: posembedding/rope_with_sin_cos_cache/docs/aclnnRopeWithSinCosCacheV2.md");
void check_mrope(In positions, In query, In key, In cache, Ints section, int64_t head, bool, int64_t cache_mode, Out,
                 Out) {
    if (positions.dtype() != at::kInt && positions.dtype() != at::kLong)
        throw Refused(std::string("positions must be int32 or int64, not ") + c10::toString(positions.dtype()));
    if (query.dim() != 2 || key.dim() != 2 || cache.dim() != 2)
        throw Refused("query, key and cos_sin_cache must have 2 dimensions, not " + number(query.dim()) + ", " +
                      number(key.dim()) + " and " + number(cache.dim()));
    if (key.dtype() != query.dtype() || cache.dtype() != query.dtype())
        throw Refused("query, key and cos_sin_cache must have the same dtype, but are " +
                      c10::str(query.dtype(), ", ", key.dtype(), " and ", cache.dtype()));
    int64_t rotary = cache.size(1), multiple = query.dtype() == at::kFloat ? 16 : 32;
    if (head <= 0 || head % multiple || rotary % multiple || rotary > head)
        throw Refused("head_size and rotary_dim must be multiples of " + number(multiple) +
                      " with rotary_dim <= head_size, but are " + number(head) + " and " + number(rotary));
    if (query.size(1) % head || key.size(1) % head)
        throw Refused("head_size, " + number(head) + ", must divide the last dimensions of query and key, " +
                      number(query.size(1)) + " and " + number(key.size(1)));
    if (positions.size(-1) != query.size(0) || key.size(0) != query.size(0))
        throw Refused("positions, query and key must have the same number of tokens, but have " +
                      number(positions.size(-1)) + ", " + number(query.size(0)) + " and " + number(key.size(0)));
    if (cache_mode != 0 && cache_mode != 1) throw Refused("cache_mode must be 0 or 1, but is " + number(cache_mode));
    if (section.size() != 0 && section.size() != 3 && section.size() != 4)
        throw Refused("mrope_section must have 3 or 4 entries, not " + number(section.size()));
    if (cache_mode && section.size() == 4)
        throw Refused("cache_mode 1 (interleave) requires 3 entries in mrope_section, not 4");
    bool sections = section.size() != 0 && section[0] > 0;
    if (positions.dim() == 1 && !sections) return;
    int64_t sum = 0;
    for (auto part : section.values) sum += part;
    if (positions.dim() != 2 || positions.size(0) != static_cast<int64_t>(section.size()))
        throw Refused("positions must have shape [3 or 4, tokens], with an entry of mrope_section for each row, not " +
                      c10::str(positions.sizes()));
    if (sum != rotary / 2)
        throw Refused("the sum of mrope_section must be rotary_dim / 2, " + number(rotary / 2) + ", but is " +
                      number(sum));
    std::array<int64_t, 4> asked{};
    std::copy(section.values.begin(), section.values.end(), asked.begin());
    if (std::find(kSections.begin(), kSections.end(), asked) == kSections.end())
        throw Refused(
            "mrope_section must be [16, 24, 24], [24, 20, 20], [8, 12, 12], [11, 11, 10] or [16, 16, 16, 16], not " +
            c10::str(at::IntArrayRef(section.values)));
}

void RopeWithSinCosCacheV2(In positions, In query, In key, In cache, Ints section, int64_t head, bool neox,
                           int64_t cache_mode, Out query_out, Out key_out) {
    auto [cos, sin] = position_factors(positions, cache, section, cache_mode == 1);
    int64_t rotary = cache.size(1);
    auto full = [&](const at::Tensor& factor) {
        return neox ? at::cat({factor, factor}, -1) : factor.repeat_interleave(2, -1);
    };
    auto apply = [&](const In& x, const Out& y) {
        auto heads = x.tensor().unflatten(1, {-1, head});
        auto rotated = rotate(heads.narrow(-1, 0, rotary), full(cos), full(sin), !neox);
        y.set(at::cat({rotated, heads.narrow(-1, rotary, head - rotary).to(at::kFloat)}, -1).flatten(1));
    };
    apply(query, query_out);
    apply(key, key_out);
}

}  // namespace

ACLNN(RotaryPositionEmbeddingV2, .check = check_rotary)
ACLNN(ApplyRotaryPosEmbV2, .check = check_apply)
ACLNN(InterleaveRope, .check = check_interleave)
ACLNN(RopeWithSinCosCacheV2, .check = check_mrope)
