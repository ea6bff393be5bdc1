// Root mean square norms whose result is quantised.
#include "norm.h"
#include "quantise.h"

namespace {

using namespace emulator;

// y / scale + zero point, or y * scale + zero point.
at::Tensor scaled(const at::Tensor& y, const In& scale, const In& zero_point, bool divide) {
    auto factor = scale.tensor().to(at::kFloat);
    auto values = divide ? y / factor : y * factor;
    return zero_point ? values + zero_point.tensor().to(at::kFloat) : values;
}

DOCUMENTED("ops-nn: norm/add_rms_norm_quant_v2/docs/aclnnAddRmsNormQuantV2.md");
// With float16 the operator has scales of float32 and zero points of int32; with bfloat16 those, or both of bfloat16.
void check_scale(const In& scale, const In& zero_point, const In& gamma, const char* name) {
    if (!scale) return;
    check_like_gamma(scale, gamma, name, false);
    check_like_gamma(zero_point, gamma, "zero_points", false);
    bool bfloat16 = gamma.dtype() == at::kBFloat16;
    if (scale.dtype() != at::kFloat && !(bfloat16 && scale.dtype() == at::kBFloat16))
        throw Refused(std::string(name) + " must be Float" + (bfloat16 ? " or BFloat16" : "") + " with " +
                      c10::toString(gamma.dtype()) + " input, not " + c10::toString(scale.dtype()));
    auto zero_dtype = scale.dtype() == at::kFloat ? at::kInt : at::kBFloat16;
    if (zero_point && zero_point.dtype() != zero_dtype)
        throw Refused(std::string("zero_points must be ") + c10::toString(zero_dtype) + " with " +
                      c10::toString(scale.dtype()) + " scales, not " + c10::toString(zero_point.dtype()));
}

void check_sixteen_bits(const In& x, const In& gamma) {
    check_norm(x, gamma);
    if (x.dtype() == at::kFloat || gamma.dtype() != x.dtype())
        throw Refused("x and gamma must both be float16 or both bfloat16");
}

DOCUMENTED("ops-nn: norm/add_rms_norm_quant_v2/docs/aclnnAddRmsNormQuantV2.md");
void check_add_quant(In x1, In x2, In gamma, In scale1, In scale2, In zero1, In zero2, In beta, int64_t, double,
                     bool, Out, Out, Out, Out) {
    check_sum(x1, x2);
    check_sixteen_bits(x1, gamma);
    if (!scale1) throw Refused("scales1 is needed");
    check_scale(scale1, zero1, gamma, "scales1");
    check_scale(scale2, zero2, gamma, "scales2");
    check_like_gamma(beta, gamma, "beta", true);
}

void AddRmsNormQuantV2(In x1, In x2, In gamma, In scale1, In scale2, In zero1, In zero2, In beta, int64_t axis,
                       double epsilon, bool divide, Out y1, Out y2, Out x, Out normalised) {
    auto sum = rounded_sum(x1, x2);
    auto y = rms_normalise(sum, gamma, epsilon, beta).values;
    store_quantised(y1, scaled(y, scale1, zero1, divide));
    if (scale2) store_quantised(y2, scaled(y, scale2, zero2, divide));
    x.set(sum);
    normalised.set(y);
}

bool wants(const Bools& mask, int index, const In& smooth1, const In& smooth2) {
    if (mask) return mask[index];
    return index == 0 || (smooth1 && smooth2);
}

DOCUMENTED("ops-nn: norm/add_rms_norm_dynamic_quant/docs/aclnnAddRmsNormDynamicQuantV2.md");
void check_add_dynamic(In x1, In x2, In gamma, In smooth1, In smooth2, In beta, double, Bools mask, Out, Out, Out, Out,
                       Out) {
    check_sum(x1, x2);
    check_sixteen_bits(x1, gamma);
    if (x1.dim() < 2 || gamma.dim() != 1) throw Refused("x1 needs at least 2 dimensions, and gamma 1");
    check_like_gamma(smooth1, gamma, "smooth_scale1", true);
    check_like_gamma(smooth2, gamma, "smooth_scale2", true);
    check_like_gamma(beta, gamma, "beta", true);
    if (!mask) {
        if (smooth2 && !smooth1) throw Refused("smooth_scale2 without smooth_scale1 needs output_mask");
        return;
    }
    if (mask.size() != 2 || (!mask[0] && !mask[1])) throw Refused("output_mask needs two entries, one of them True");
    if ((smooth1 && !mask[0]) || (smooth2 && !mask[1]))
        throw Refused("output_mask must be True where a smooth scale is given");
}

void AddRmsNormDynamicQuantV2(In x1, In x2, In gamma, In smooth1, In smooth2, In beta, double epsilon, Bools mask,
                              Out y1, Out y2, Out x, Out scale1, Out scale2) {
    auto sum = rounded_sum(x1, x2);
    auto y = rms_normalise(sum, gamma, epsilon, beta).values;
    auto smoothed = [&](const In& smooth) { return smooth ? y * smooth.tensor().to(at::kFloat) : y; };
    if (wants(mask, 0, smooth1, smooth2)) quantise_rows(smoothed(smooth1), y1, scale1);
    if (wants(mask, 1, smooth1, smooth2)) quantise_rows(smoothed(smooth2), y2, scale2);
    x.set(sum);
}

DOCUMENTED("ops-nn: norm/rms_norm_quant/docs/aclnnRmsNormQuant.md");
void check_quant(In x, In gamma, In beta, In scale, In offset, double, Out) {
    // Gamma and beta may come as [1, n].
    bool last = (gamma.dim() == 1 || (gamma.dim() == 2 && gamma.size(0) == 1)) && gamma.size(-1) == x.size(-1);
    if (!last) throw Refused("gamma must be [n] or [1, n], with n the size of x's last dimension");
    if ((x.dtype() != at::kHalf && x.dtype() != at::kBFloat16) || gamma.dtype() != x.dtype())
        throw Refused("x and gamma must both be float16 or both bfloat16");
    check_like_gamma(beta, gamma, "beta", true);
    if (scale.dim() != 1 || scale.size(0) != 1 || scale.dtype() != x.dtype())
        throw Refused("scale must be [1], of x's dtype");
    if (offset && (offset.sizes() != scale.sizes() || offset.dtype() != at::kChar))
        throw Refused("offset must be [1], int8");
}

void RmsNormQuant(In x, In gamma, In beta, In scale, In offset, double epsilon, Out y) {
    auto shift = beta ? beta.tensor().reshape(-1) : at::Tensor();
    auto values = rms_normalise(x, gamma.tensor().reshape(-1), epsilon, shift).values;
    store_quantised(y, scaled(values, scale, offset, false));
}

DOCUMENTED("ops-nn: norm/rms_norm_quant_v3/docs/aclnnRmsNormQuantV3.md");
void check_quant_v3(In x, In gamma, In scale, In offset, In beta, double, bool, bool, Out, Out) {
    check_norm(x, gamma);
    if (gamma.dtype() != x.dtype()) throw Refused("gamma must be of x's dtype");
    check_like_gamma(beta, gamma, "beta", true);
    int64_t columns = scale ? scale.size(-1) : 0;
    if (columns != 1 && columns != x.size(-1))
        throw Refused("scale must have 1 element or as many as x's last dimension");
    if (offset && offset.sizes() != scale.sizes()) throw Refused("offset must have the shape of scale");
}

void RmsNormQuantV3(In x, In gamma, In scale, In offset, In beta, double epsilon, bool divide, bool want_rstd, Out y,
                    Out rstd) {
    auto norm = rms_normalise(x, gamma, epsilon, beta.tensor());
    store_quantised(y, scaled(norm.values, scale, offset, divide));
    if (want_rstd) rstd.set(norm.rstd);
}

}  // namespace

ACLNN(AddRmsNormQuantV2, .check = check_add_quant)
ACLNN(AddRmsNormDynamicQuantV2, .check = check_add_dynamic)
ACLNN(RmsNormQuant, .check = check_quant)
ACLNN(RmsNormQuantV3, .check = check_quant_v3)
