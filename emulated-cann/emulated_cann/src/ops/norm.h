// The RMS norm that the fused norms share.
#pragma once

#include "op.h"

namespace emulator {

struct Normalized {
    at::Tensor values;  // float32
    at::Tensor rstd;    // float32, with size 1 in the normalized dimensions
};

// Normalizes over gamma's dimensions, the last ones of x. Computes in float32 and does not round. beta may be
// undefined.
Normalized rms_normalize(const at::Tensor& x, const at::Tensor& gamma, double epsilon, const at::Tensor& beta = {});

// Returns x1 + x2 rounded to their dtype. The fused norms normalize the rounded sum.
inline at::Tensor rounded_sum(const at::Tensor& x1, const at::Tensor& x2) {
    return (x1.to(at::kFloat) + x2.to(at::kFloat)).to(x1.scalar_type());
}

// Throws Refused unless x is floating point of 1 to 8 dimensions, gamma has the shape of its last dimensions, and the
// dtypes are a supported pair.
void check_norm(const In& x, const In& gamma);
void check_sum(const In& x1, const In& x2);
// Throws Refused unless `other` is null or has gamma's shape and, if `same_dtype`, its dtype.
void check_like_gamma(const In& other, const In& gamma, const char* name, bool same_dtype);

}  // namespace emulator
