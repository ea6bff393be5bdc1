// The root mean square norm that the fused norms share.
#pragma once

#include "op.h"

namespace emulator {

struct Normalised {
    at::Tensor values;  // float32
    at::Tensor rstd;    // float32, with the normalised dimensions as ones
};

// Over as many last dimensions as gamma has; beta may be undefined. Float32 inside, not rounded.
Normalised rms_normalise(const at::Tensor& x, const at::Tensor& gamma, double epsilon, const at::Tensor& beta = {});

// The sum of the residual and the new values, rounded to their dtype, which is what the norm sees.
inline at::Tensor rounded_sum(const at::Tensor& x1, const at::Tensor& x2) {
    return (x1.to(at::kFloat) + x2.to(at::kFloat)).to(x1.scalar_type());
}

// Throws Refused unless x is floating point of 1 to 8 dimensions, gamma has the shape of its last ones, and the dtypes
// go together.
void check_norm(const In& x, const In& gamma);
void check_sum(const In& x1, const In& x2);
// Throws Refused unless `other` is null or has gamma's shape and, if `same_dtype`, its dtype.
void check_like_gamma(const In& other, const In& gamma, const char* name, bool same_dtype);

}  // namespace emulator
