// The arithmetic of reductions.
#pragma once

#include <cstddef>
#include <vector>

#include "hccl/hccl_types.h"

namespace emulator {

// Reduces `count` elements of each of `from`, in their order. Elements of 16 bits are computed in float32 and rounded
// once; integers wrap around. `out` may be one of `from`.
void reduce(void* out, const std::vector<const char*>& from, size_t count, uint32_t dtype, HcclReduceOp reduction);

}  // namespace emulator
