// Random numbers.
#pragma once

#include <ATen/core/ivalue.h>

namespace emulated {

// A generator of the CPU for one call, from the state of the device's, which goes on. In a graph each replay draws on.
c10::IValue generator_for_call(const c10::IValue& given, bool captured);

}  // namespace emulated
