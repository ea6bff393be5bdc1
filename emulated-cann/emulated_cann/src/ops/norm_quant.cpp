// RMS norms fused with quantization.
#include "norm.h"
#include "quantize.h"

namespace {

using namespace emulator;

// Returns y / scale + zero_point, or y * scale + zero_point.
at::Tensor scaled(const at::Tensor& y, const In& scale, const In& zero_point, bool divide) {
    auto factor = scale.tensor().to(at::kFloat);
    auto values = divide ? y / factor : y * factor;
    return zero_point ? values + zero_point.tensor().to(at::kFloat) : values;
}

DOCUMENTED("ops-nn: norm/add_rms_norm_quant_v2/docs/aclnnAddRmsNormQuantV2.md");
// Float16 input takes float32 scales with int32 zero points. bfloat16 input takes these, or both in bfloat16.
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
        throw Refused("x and gamma must both be float16 or both bfloat16, but are " +
                      c10::str(x.dtype(), " and ", gamma.dtype()));
}

DOCUMENTED("ops-nn: norm/add_rms_norm_quant_v2/docs/aclnnAddRmsNormQuantV2.md");
void check_add_quant(In x1, In x2, In gamma, In scale1, In scale2, In zero1, In zero2, In beta, int64_t, double, bool,
                     Out, Out, Out, Out) {
    check_sum(x1, x2);
    check_sixteen_bits(x1, gamma);
    if (!scale1) throw Refused("scales1 is required");
    check_scale(scale1, zero1, gamma, "scales1");
    check_scale(scale2, zero2, gamma, "scales2");
    check_like_gamma(beta, gamma, "beta", true);
}

void AddRmsNormQuantV2(In x1, In x2, In gamma, In scale1, In scale2, In zero1, In zero2, In beta, int64_t axis,
                       double epsilon, bool divide, Out y1, Out y2, Out x, Out normalized) {
    auto sum = rounded_sum(x1, x2);
    auto y = rms_normalize(sum, gamma, epsilon, beta).values;
    store_quantized(y1, scaled(y, scale1, zero1, divide));
    if (scale2) store_quantized(y2, scaled(y, scale2, zero2, divide));
    x.set(sum);
    normalized.set(y);
}

bool is_requested(const Bools& mask, int index, const In& smooth1, const In& smooth2) {
    if (mask) return mask[index];
    return index == 0 || (smooth1 && smooth2);
}

DOCUMENTED("ops-nn: norm/add_rms_norm_dynamic_quant/docs/aclnnAddRmsNormDynamicQuantV2.md");
void check_add_dynamic(In x1, In x2, In gamma, In smooth1, In smooth2, In beta, double, Bools mask, Out, Out, Out, Out,
                       Out) {
    check_sum(x1, x2);
    check_sixteen_bits(x1, gamma);
    if (x1.dim() < 2 || gamma.dim() != 1)
        throw Refused("x1 must have at least 2 dimensions and gamma 1, but they have shapes " +
                      c10::str(x1.sizes(), " and ", gamma.sizes()));
    check_like_gamma(smooth1, gamma, "smooth_scale1", true);
    check_like_gamma(smooth2, gamma, "smooth_scale2", true);
    check_like_gamma(beta, gamma, "beta", true);
    if (!mask) {
        if (smooth2 && !smooth1) throw Refused("smooth_scale2 without smooth_scale1 requires output_mask");
        return;
    }
    if (mask.size() != 2 || (!mask[0] && !mask[1]))
        throw Refused("output_mask must have two entries, at least one of them True");
    if ((smooth1 && !mask[0]) || (smooth2 && !mask[1]))
        throw Refused("output_mask must be True for each output with a smooth scale");
}

void AddRmsNormDynamicQuantV2(In x1, In x2, In gamma, In smooth1, In smooth2, In beta, double epsilon, Bools mask,
                              Out y1, Out y2, Out x, Out scale1, Out scale2) {
    auto sum = rounded_sum(x1, x2);
    auto y = rms_normalize(sum, gamma, epsilon, beta).values;
    auto smoothed = [&](const In& smooth) { return smooth ? y * smooth.tensor().to(at::kFloat) : y; };
    if (is_requested(mask, 0, smooth1, smooth2)) quantize_rows(smoothed(smooth1), y1, scale1);
    if (is_requested(mask, 1, smooth1, smooth2)) quantize_rows(smoothed(smooth2), y2, scale2);
    x.set(sum);
}

DOCUMENTED("ops-nn: norm/rms_norm_quant/docs/aclnnRmsNormQuant.md");
void check_quant(In x, In gamma, In beta, In scale, In offset, double, Out) {
    // gamma and beta may have shape [1, n].
    bool last = (gamma.dim() == 1 || (gamma.dim() == 2 && gamma.size(0) == 1)) && gamma.size(-1) == x.size(-1);
    if (!last)
        throw Refused("gamma must have shape [n] or [1, n] with n = " + std::to_string(x.size(-1)) +
                      ", the size of x's last dimension, not " + c10::str(gamma.sizes()));
    if ((x.dtype() != at::kHalf && x.dtype() != at::kBFloat16) || gamma.dtype() != x.dtype())
        throw Refused("x and gamma must both be float16 or both bfloat16, but are " +
                      c10::str(x.dtype(), " and ", gamma.dtype()));
    check_like_gamma(beta, gamma, "beta", true);
    if (scale.dim() != 1 || scale.size(0) != 1 || scale.dtype() != x.dtype())
        throw Refused("scale must have shape [1] and x's dtype, " +
                      c10::str(x.dtype(), ", but is ", scale.dtype(), " of shape ", scale.sizes()));
    if (offset && (offset.sizes() != scale.sizes() || offset.dtype() != at::kChar))
        throw Refused("offset must be int8 of shape [1], not " +
                      c10::str(offset.dtype(), " of shape ", offset.sizes()));
}

void RmsNormQuant(In x, In gamma, In beta, In scale, In offset, double epsilon, Out y) {
    auto shift = beta ? beta.tensor().reshape(-1) : at::Tensor();
    auto values = rms_normalize(x, gamma.tensor().reshape(-1), epsilon, shift).values;
    store_quantized(y, scaled(values, scale, offset, false));
}

DOCUMENTED("ops-nn: norm/rms_norm_quant_v3/docs/aclnnRmsNormQuantV3.md");
void check_quant_v3(In x, In gamma, In scale, In offset, In beta, double, bool, bool, Out, Out) {
    check_norm(x, gamma);
    if (gamma.dtype() != x.dtype())
        throw Refused("gamma must have x's dtype, " + c10::str(x.dtype(), ", not ", gamma.dtype()));
    check_like_gamma(beta, gamma, "beta", true);
    int64_t columns = scale ? scale.size(-1) : 0;
    if (columns != 1 && columns != x.size(-1))
        throw Refused("scale must have 1 element or as many as x's last dimension, " + std::to_string(x.size(-1)) +
                      ", but has " + std::to_string(columns));
    if (offset && offset.sizes() != scale.sizes())
        throw Refused("offset must have the shape of scale, " + c10::str(scale.sizes(), ", not ", offset.sizes()));
}

void RmsNormQuantV3(In x, In gamma, In scale, In offset, In beta, double epsilon, bool divide, bool want_rstd, Out y,
                    Out rstd) {
    auto norm = rms_normalize(x, gamma, epsilon, beta.tensor());
    store_quantized(y, scaled(norm.values, scale, offset, divide));
    if (want_rstd) rstd.set(norm.rstd);
}

}  // namespace

ACLNN(AddRmsNormQuantV2, .check = check_add_quant)
ACLNN(AddRmsNormDynamicQuantV2, .check = check_add_dynamic)
ACLNN(RmsNormQuant, .check = check_quant)
ACLNN(RmsNormQuantV3, .check = check_quant_v3)
