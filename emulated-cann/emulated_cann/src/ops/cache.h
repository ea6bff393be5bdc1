// Rows of a paged key or value cache.
#pragma once

#include "op.h"

namespace emulator {

// Return views of a cache as [blocks, block_size, H / C, C]: the first of [blocks, block_size, ..., C], the second, for
// FRACTAL_NZ, of [blocks, H / C, block_size, C].
at::Tensor rows_of_blocks(const at::Tensor& cache);
at::Tensor rows_of_fractal_blocks(const at::Tensor& cache);

// Writes rows [n, H] to slots, which are numbered over all blocks. Skips negative slots; throws for a slot past the
// end.
void write_slots(const at::Tensor& cache_rows, const at::Tensor& rows, const at::Tensor& slots);

// Throws Refused unless slots is int32 or int64 of shape [rows].
void check_slots(const In& slots, int64_t rows);

}  // namespace emulator
