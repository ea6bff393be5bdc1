// Overlap of tensors with gaps.
#pragma once

#include "runtime/launch.h"

namespace emulator {

// Returns whether two operands have a byte in common. Takes tensors with very many separate parts to overlap if the
// ranges from their first byte to their last do.
bool do_overlap(const Operand& one, const Operand& other);

}  // namespace emulator
