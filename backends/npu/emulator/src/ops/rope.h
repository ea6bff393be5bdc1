// The rotation that the rotary embeddings share.
#pragma once

#include "op.h"

namespace emulator {

// x * cos + turned(x) * sin over the last dimension, in float32: halves change places, or, interleaved, neighbours.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool interleaved);

}  // namespace emulator
