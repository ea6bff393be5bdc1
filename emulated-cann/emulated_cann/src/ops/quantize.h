// Quantization helpers that several operations share.
#pragma once

#include "op.h"

namespace emulator {

// Rounds half to even, clamps to the output's range and stores. An int32 output an eighth as wide as the values stores
// int4, eight per element, the first in the lowest bits.
void store_quantized(const Out& output, const at::Tensor& values);

// Unpacks such an output: int32 [..., n] to float32 [..., 8 * n].
at::Tensor unpack_int4(const at::Tensor& packed);

// TransQuantParam packs a float32 scale into the low 32 bits and a 9-bit offset at bit 37.
bool is_packed_scale(const In& scale);
at::Tensor scale_of(const at::Tensor& scale);
at::Tensor offset_of(const at::Tensor& scale);

// Returns the exact product of int8 matrices as float32 or float64: x1 [..., m, k], x2 [..., k, n].
at::Tensor integer_product(const at::Tensor& x1, const at::Tensor& x2);

// Returns the quantized value of a row's largest magnitude: 127, or 7 for an int4 output.
double largest_quantized(const Out& output, int64_t width);

// Quantizes symmetrically with the scale max|row| / largest for each row.
void quantize_rows(const at::Tensor& values, const Out& output, const Out& scale);

// Returns a row of `factors` for each row of x. Row i of `factors` applies up to ends[i]; rows past the last end get 1.
at::Tensor rows_by_group(const at::Tensor& factors, const at::Tensor& ends, int64_t rows);

}  // namespace emulator
