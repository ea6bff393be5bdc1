// RMS norms, also fused with a residual sum and a cast.
#include "norm.h"

#include <numeric>

namespace emulator {

namespace {


}  // namespace

Normalized rms_normalize(const at::Tensor& x, const at::Tensor& gamma, double epsilon, const at::Tensor& beta) {
    std::vector<int64_t> dims(gamma.dim());
    std::iota(dims.begin(), dims.end(), x.dim() - gamma.dim());
    auto wide = x.to(at::kFloat);
    auto rstd = at::rsqrt(wide.square().mean(dims, true) + epsilon);
    auto values = wide * rstd * gamma.to(at::kFloat);
    if (beta.defined()) values += beta.to(at::kFloat);
    return {values, rstd};
}

DOCUMENTED(
    "ops-nn: norm/rms_norm/docs/aclnnRmsNorm.md"
    "; ops-nn: norm/gemma_rms_norm/docs/aclnnGemmaRmsNorm.md"
    "; ops-nn: norm/add_rms_norm/docs/aclnnAddRmsNorm.md");
void check_norm(const In& x, const In& gamma) {
    if (x.dim() < 1 || x.dim() > 8) throw Refused("x must have 1 to 8 dimensions, but has " + std::to_string(x.dim()));
    if (!at::isFloatingType(x.dtype()) || x.dtype() == at::kDouble)
        throw Refused("x must be float16, bfloat16 or float32, not " + text(x.dtype()));
    if (gamma.dtype() != x.dtype() && gamma.dtype() != at::kFloat)
        throw Refused("gamma must have x's dtype, " + text(x.dtype()) + ", or float32, not " + text(gamma.dtype()));
    bool suffix = gamma.dim() >= 1 && gamma.dim() <= x.dim();
    for (int64_t d = 1; suffix && d <= gamma.dim(); ++d) suffix = gamma.size(-d) == x.size(-d);
    if (!suffix)
        throw Refused("gamma must have the shape of x's last dimensions, but x has shape " +
                      c10::str(x.sizes(), " and gamma ", gamma.sizes()));
}

void check_sum(const In& x1, const In& x2) {
    if (x1.sizes() != x2.sizes() || x1.dtype() != x2.dtype())
        throw Refused("x1 and x2 must have the same shape and dtype, but are " +
                      c10::str(x1.dtype(), " of shape ", x1.sizes(), " and ", x2.dtype(), " of shape ", x2.sizes()));
}

void check_like_gamma(const In& other, const In& gamma, const char* name, bool same_dtype) {
    if (!other) return;
    if (other.sizes() != gamma.sizes())
        throw Refused(std::string(name) + " must have gamma's shape, " +
                      c10::str(gamma.sizes(), ", not ", other.sizes()));
    if (same_dtype && other.dtype() != gamma.dtype())
        throw Refused(std::string(name) + " must have gamma's dtype, " + text(gamma.dtype()) + ", not " + text(other.dtype()));
}

}  // namespace emulator

namespace {

using namespace emulator;

DOCUMENTED(
    "ops-nn: norm/add_rms_norm/docs/aclnnAddRmsNorm.md"
    "; ops-nn: norm/inplace_add_rms_norm/docs/aclnnInplaceAddRmsNorm.md"
    "; ops-nn: norm/add_rms_norm_cast/docs/aclnnAddRmsNormCast.md");
void check_rms_norm(In x, In gamma, double, Out, Out) { check_norm(x, gamma); }

void RmsNorm(In x, In gamma, double epsilon, Out y, Out rstd) {
    auto norm = rms_normalize(x, gamma, epsilon);
    y.set(norm.values);
    rstd.set(norm.rstd);
}

void GemmaRmsNorm(In x, In gamma, double epsilon, Out y, Out rstd) {
    auto norm = rms_normalize(x, gamma.tensor().to(at::kFloat) + 1, epsilon);
    y.set(norm.values);
    rstd.set(norm.rstd);
}

void check_add_rms_norm(In x1, In x2, In gamma, double, Out, Out, Out) {
    check_sum(x1, x2);
    check_norm(x1, gamma);
    if (gamma.dtype() != x1.dtype()) throw Refused("gamma must have x1's dtype, " + text(x1.dtype()) + ", not " + text(gamma.dtype()));
}

void AddRmsNorm(In x1, In x2, In gamma, double epsilon, Out y, Out rstd, Out x) {
    auto sum = rounded_sum(x1, x2);
    auto norm = rms_normalize(sum, gamma, epsilon);
    y.set(norm.values);
    rstd.set(norm.rstd);
    x.set(sum);
}

void check_inplace(InOut x1, InOut x2, In gamma, double epsilon, Out rstd) {
    check_add_rms_norm(x1, x2, gamma, epsilon, rstd, rstd, rstd);
}

void InplaceAddRmsNorm(InOut x1, InOut x2, In gamma, double epsilon, Out rstd) {
    AddRmsNorm(x1, x2, gamma, epsilon, x1, rstd, x2);
}

void check_cast(In x1, In x2, In gamma, double epsilon, Out, Out y, Out rstd, Out x) {
    check_add_rms_norm(x1, x2, gamma, epsilon, y, rstd, x);
    if (x1.dtype() == at::kFloat) throw Refused("x1 must be float16 or bfloat16, not float32");
}

// wide is y in float32, after it was rounded to x1's dtype.
void AddRmsNormCast(In x1, In x2, In gamma, double epsilon, Out wide, Out y, Out rstd, Out x) {
    auto sum = rounded_sum(x1, x2);
    auto norm = rms_normalize(sum, gamma, epsilon);
    auto rounded = norm.values.to(x1.dtype());
    wide.set(rounded);
    y.set(rounded);
    rstd.set(norm.rstd);
    x.set(sum);
}

}  // namespace

ACLNN(RmsNorm, .check = check_rms_norm)
ACLNN(GemmaRmsNorm, .check = check_rms_norm)
ACLNN(AddRmsNorm, .check = check_add_rms_norm)
ACLNN(InplaceAddRmsNorm, .check = check_inplace)
ACLNN(AddRmsNormCast, .check = check_cast)
