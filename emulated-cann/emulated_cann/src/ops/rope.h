// The rotation that the rotary embeddings share.
#pragma once

#include "op.h"

namespace emulator {

// Returns x * cos + rotated(x) * sin over the last dimension in float32. Rotation swaps halves or, if interleaved,
// adjacent elements.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool interleaved);

}  // namespace emulator
