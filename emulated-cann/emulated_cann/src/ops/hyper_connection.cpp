// Hyper-connections: the weights by which several residual streams are collapsed, mixed, and added to.
#include "grouped.h"
#include "numeric.h"

namespace {

using namespace emulator;

constexpr int64_t kWidest = 16384, kAligned = 16, kMostIterations = 100;

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_mhc_pre.md; "
           "op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_mhc_sinkhorn.md; "
           "op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_mhc_post.md");

void check_product(const std::string& name) {
    require(product_line(name) == Line::a5, name + " is for Ascend 950, not for " + soc_name());
}

void check_count(int64_t count) {
    require(count == 4 || count == 6 || count == 8, "n must be 4, 6 or 8, but is " + std::to_string(count));
}

// Returns a shape with others than the last dimensions of x, and further ones.
std::vector<int64_t> like(const In& x, int64_t omitted, std::initializer_list<int64_t> further) {
    std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end() - omitted);
    shape.insert(shape.end(), further);
    return shape;
}

void check_streams(const In& x) {
    require(x.dim() == 3 || x.dim() == 4, "x must have 3 or 4 dimensions, but has " + std::to_string(x.dim()));
    require_dtype(x, {at::kHalf, at::kBFloat16}, "x");
}

void check_pre(In x, In phi, In alpha, In bias, In gamma, double, double, Out h_in, Out h_post, Out h_res, Out inv_rms,
               Out h_mix, Out h_pre) {
    check_product("MhcPre");
    check_streams(x);
    require(x.raw().numel() > 0, "x must have elements");
    const int64_t count = x.size(-2), width = x.size(-1), rows = count * count + 2 * count;
    check_count(count);
    require(width <= kWidest && width % kAligned == 0,
            "D must be a multiple of 16, up to 16384, but is " + std::to_string(width));
    for (auto& [name, tensor] : {std::pair("phi", phi), std::pair("alpha", alpha), std::pair("bias", bias)})
        require_dtype(tensor, {at::kFloat}, name);
    require_shape(phi, {rows, count * width}, "phi");
    require_shape(alpha, {3}, "alpha");
    require_shape(bias, {rows}, "bias");
    require_dtype(gamma, {at::kFloat}, "gamma");
    require_shape(gamma, {count, width}, "gamma");
    require(h_in.dtype() == x.dtype(), "h_in must have x's dtype");
    require_shape(h_in, like(x, 2, {width}), "h_in");
    require_shape(h_post, like(x, 2, {count}), "h_post");
    require_shape(h_res, like(x, 2, {count, count}), "h_res");
    require_shape(inv_rms, like(x, 2, {}), "inv_rms");
    require_shape(h_mix, like(x, 2, {rows}), "h_mix");
    require_shape(h_pre, like(x, 2, {count}), "h_pre");
}

void MhcPre(In x, In phi, In alpha, In bias, In gamma, double norm_eps, double hc_eps, Out h_in, Out h_post, Out h_res,
            Out inv_rms, Out h_mix, Out h_pre) {
    const int64_t count = x.size(-2);
    auto streams = x.tensor().to(at::kFloat), flat = streams.flatten(-2);
    auto scale = at::rsqrt(flat.square().mean(-1, true) + norm_eps);
    auto mixed = at::linear(gamma ? flat * gamma.tensor().flatten() : flat, phi.tensor());
    auto weights = (mixed * scale).split_with_sizes({count, count, count * count}, -1);
    auto offsets = bias.tensor().split_with_sizes({count, count, count * count});
    auto factors = alpha.tensor().unbind();
    auto pre = at::sigmoid(weights[0] * factors[0] + offsets[0]) + hc_eps;
    h_in.set((pre.unsqueeze(-1) * streams).sum(-2));
    h_post.set(2 * at::sigmoid(weights[1] * factors[1] + offsets[1]));
    h_res.set((weights[2] * factors[2] + offsets[2]).unflatten(-1, {count, count}));
    inv_rms.set(scale.squeeze(-1));
    h_mix.set(mixed);
    h_pre.set(pre);
}

DOCUMENTED("ops-transformer: mhc/mhc_pre/docs/aclnnMhcPreV2.md");

void check_pre_by_mode(In x, In phi, In alpha, In bias, In gamma, double norm_eps, double hc_eps, int64_t mode, Out h_in,
                       Out h_post, Out h_res, Out inv_rms, Out h_mix, Out h_pre) {
    check_pre(x, phi, alpha, bias, gamma, norm_eps, hc_eps, h_in, h_post, h_res, inv_rms, h_mix, h_pre);
    require(mode == 0 || mode == 1, "opImplMode must be 0 or 1, but is " + std::to_string(mode));
    if (mode) throw NotEmulated("products in HF32 are not emulated");
}

void MhcPreV2(In x, In phi, In alpha, In bias, In gamma, double norm_eps, double hc_eps, int64_t, Out h_in, Out h_post,
              Out h_res, Out inv_rms, Out h_mix, Out h_pre) {
    MhcPre(x, phi, alpha, bias, gamma, norm_eps, hc_eps, h_in, h_post, h_res, inv_rms, h_mix, h_pre);
}

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_mhc_sinkhorn.md");

void check_sinkhorn(In x, float, int64_t iterations, Out y, Out norm, Out sum) {
    check_product("MhcSinkhorn");
    require_dtype(x, {at::kFloat}, "x");
    require((x.dim() == 3 || x.dim() == 4) && x.raw().numel() > 0, "x must have 3 or 4 dimensions, and elements");
    check_count(x.size(-1));
    require(x.size(-2) == x.size(-1), "x must have square matrices");
    require(iterations >= 1 && iterations <= kMostIterations,
            "num_iters must be from 1 to 100, but is " + std::to_string(iterations));
    require_shape(y, x.sizes(), "y");
    if (norm || sum) throw NotEmulated("the intermediate results of out_flag 1 are not emulated");
}

void MhcSinkhorn(In x, float eps, int64_t iterations, Out y, Out, Out) {
    auto mix = at::softmax(x.tensor(), -1) + eps;
    mix = mix / (mix.sum(-2, true) + eps);
    for (int64_t i = 1; i < iterations; ++i) {
        mix = mix / (mix.sum(-1, true) + eps);
        mix = mix / (mix.sum(-2, true) + eps);
    }
    y.set(mix);
}

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_mhc_post.md");

void check_post(In x, In h_res, In h_out, In h_post, Out y) {
    check_product("MhcPost");
    check_streams(x);
    const int64_t count = x.size(-2);
    require(h_out.dtype() == x.dtype() && y.dtype() == x.dtype(), "h_out and y must have x's dtype");
    require_dtype(h_res, {at::kFloat}, "h_res");
    require_dtype(h_post, {at::kFloat}, "h_post");
    require_shape(h_res, like(x, 2, {count, count}), "h_res");
    require_shape(h_out, like(x, 2, {x.size(-1)}), "h_out");
    require_shape(h_post, like(x, 2, {count}), "h_post");
    require_shape(y, x.sizes(), "y");
}

// Without h_res, streams are not mixed.
void MhcPost(In x, In h_res, In h_out, In h_post, Out y) {
    auto streams = x.tensor().to(at::kFloat), added = h_out.tensor().to(at::kFloat).unsqueeze(-2);
    auto mixed = h_res ? at::matmul(h_res.tensor().transpose(-1, -2), streams) : streams;
    y.set(mixed + h_post.tensor().unsqueeze(-1) * added);
}

}  // namespace

ACLNN(MhcPre, .check = check_pre)
ACLNN(MhcPreV2, .check = check_pre_by_mode)
ACLNN(MhcSinkhorn, .check = check_sinkhorn)
ACLNN(MhcPost, .check = check_post)
