// The trace of executed tasks; see control.h.
#pragma once

#include "runtime/task.h"

namespace emulator {

enum class TraceKind { kernel, copy, fill, graph, update, prefetch, host };

bool tracing();
// Returns the text as a JSON string.
std::string quoted(const std::string& text);
// Launches work that the trace lists under the given kind.
int launch_as(TraceKind kind, aclrtStream stream, Launch launch);
// Record a launch, or a task without operands, that was captured or ran.
void trace_launch(TraceKind kind, const Launch& launch, const Stream& stream, const char* phase, double microseconds);
void trace_event(TraceKind kind, const std::string& name, const Context& context, size_t bytes);

}  // namespace emulator
