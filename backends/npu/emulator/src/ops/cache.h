// Rows of a key or value cache that lies in blocks.
#pragma once

#include "op.h"

namespace emulator {

// Views of a cache as [blocks, block_size, H / C, C]: from [blocks, block_size, ...], where C is the last dimension,
// and in fractals from [blocks, H / C, block_size, C].
at::Tensor rows_of_blocks(const at::Tensor& cache);
at::Tensor rows_of_fractal_blocks(const at::Tensor& cache);

// Writes rows [n, H] to the slots, which count over all blocks. A negative slot is left out; one past the end throws.
void write_slots(const at::Tensor& cache_rows, const at::Tensor& rows, const at::Tensor& slots);

// Throws Refused unless the slots are int32 or int64 and as many as `rows`.
void check_slots(const In& slots, int64_t rows);

}  // namespace emulator
