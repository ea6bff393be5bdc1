// The trace of executed tasks; see control.h.
#pragma once

#include <chrono>

#include "runtime/task.h"

namespace emulator {

enum class TraceKind { kernel, copy, fill, graph, update, prefetch, host };

bool tracing();
// Returns the text as a JSON string.
std::string quoted(const std::string& text);
// Launches work that the trace lists under the given kind.
int launch_as(TraceKind kind, aclrtStream stream, Launch launch);
using TracePoint = std::chrono::steady_clock::time_point;
// Record a launch that began at a time and ran until now; that is captured; and a task without operands.
void trace_launch(TraceKind kind, const Launch& launch, const Context& context, TracePoint begin);
void trace_capture(TraceKind kind, const Launch& launch, const Stream& stream);
void trace_event(TraceKind kind, const std::string& name, const Context& context, size_t bytes, TracePoint begin,
                 uint32_t call = 0);

// Also writes what runs to a file, as trace events; see trace_file.cpp. `arguments` is a JSON object.
bool writing_trace();
void write_trace(const char* kind, const std::string& name, const Stream& stream, double start, double microseconds,
                 const std::string& arguments);
void flush_trace();

}  // namespace emulator
