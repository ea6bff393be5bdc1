// Races: accesses to the same bytes, one of which writes, without an order between them.
// The order is that of streams, events, waits of the host, replays and collectives, whatever order the tasks ran in.
// All threads of the host are one timeline, because the order between them cannot be seen.
#pragma once

#include "runtime/graph.h"
#include "runtime/launch.h"
#include "runtime/times.h"

namespace emulator {

bool finding_races();

// The functions below do nothing unless races are looked for.

// Makes what the host has waited for ordered before the task, which is submitted to a stream.
void order_after_host(Task& task);
// Called when a task of the stream's own queue begins.
void begin_in_order(Stream& stream, const Task& task);
// Adds what is ordered before this point of a task's timeline to `into`, and the reverse.
void release_to(Times& into, const Context& context);
void acquire_from(const Times& from, const Context& context);
// The same with a value that others can find by a name, such as an address.
void release_by_name(const std::string& name, const Context& context);
void acquire_by_name(const std::string& name, const Context& context);
// The host has found that a point of time, or all tasks of a stream, are over.
void host_acquires(const Times& from);
void host_acquires(Stream& stream);
// A function of the host runs as a task of a stream.
void run_on_host(const Context& context);
// Begins and ends the timelines of the lanes of a replay, which is not begun twice.
void fork_lanes(const Context& context, Replay& replay);
void join_lanes(Replay& replay);

// An access of a task, or of the host if the stream's number is negative.
void access_memory(const Context& context, const std::string& name, uint32_t call,
                   const std::vector<Operand>& operands);
// The host frees memory of a device, or pinned memory.
void free_in_order(const void* address, size_t bytes);

}  // namespace emulator
