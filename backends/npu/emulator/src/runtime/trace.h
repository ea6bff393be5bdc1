// What ran, for whoever asked: see control.h.
#pragma once

#include "runtime/task.h"

namespace emulator {

enum class TraceKind { kernel, copy, fill, graph, update, prefetch, host };

bool tracing();
// Launches under another heading than kernel.
int launch_as(TraceKind kind, aclrtStream stream, Launch launch);
// A launch, or what is treated like one, that was captured or that ran.
void trace_launch(TraceKind kind, const Launch& launch, const Stream& stream, const char* phase, double microseconds);
void trace_event(TraceKind kind, const std::string& name, const Context& context, size_t bytes);

}  // namespace emulator
