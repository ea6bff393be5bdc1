// How values become integers: what the quantising operations share.
#pragma once

#include "op.h"

namespace emulator {

// Rounds half to even, clamps to the output's range and stores. An int32 output an eighth as wide as the values takes
// them as int4, eight to an element, the first in the lowest bits.
void store_quantised(const Out& output, const at::Tensor& values);

// The same packing read back: int32 [..., n] to float32 [..., 8 * n].
at::Tensor unpack_int4(const at::Tensor& packed);

// What the largest magnitude of a row becomes: 127, or 7 where the output takes int4.
double largest_quantised(const Out& output, int64_t width);

// Symmetric quantisation with a scale for each row, max|row| / largest.
void quantise_rows(const at::Tensor& values, const Out& output, const Out& scale);

// Each row of `factors` belongs to the rows of x up to the next of `ends`; past the last end, to none.
at::Tensor rows_by_group(const at::Tensor& factors, const at::Tensor& ends, int64_t rows);

}  // namespace emulator
