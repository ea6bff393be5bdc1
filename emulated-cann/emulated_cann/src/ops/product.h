// Matrix products that accumulate in float32.
#pragma once

#include <ATen/ATen.h>

namespace emulator {

// Returns left @ right as at::matmul does, in float32 if both are of 16 bits. A product of few rows with a matrix whose
// columns are contiguous, such as a transposed weight, reads the matrix once, on several cores if it is large.
at::Tensor wide_product(const at::Tensor& left, const at::Tensor& right);

}  // namespace emulator
