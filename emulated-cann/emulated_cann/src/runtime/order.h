// The state that orders accesses to memory, for races.cpp; others use races.h.
#pragma once

#include "runtime/races.h"

namespace emulator {

void find_races(bool on);

// Guards all timelines. A thread that holds it takes no lock but that of stacks.
std::mutex& order_mutex();
Timeline& timeline_of(const Context& context);
Timeline& host_timeline();

}  // namespace emulator
