// Python stacks of calls, for reports of races and for traces; see call_stack in launch.h.
#pragma once

#include <string>
#include <vector>

#include "runtime/launch.h"

namespace emulator {

// Switches the recording of stacks on, or off if as many calls switched it off as on.
void record_calls(bool on);
// Returns call_stack(), or 0 if another thread holds Python's lock: for callers that hold a lock that it may wait for.
uint32_t call_stack_if_locked();
// Returns the frames of a stack, the innermost first, such as `model.py:12 in forward`.
std::vector<std::string> frames_of(uint32_t call);

}  // namespace emulator
