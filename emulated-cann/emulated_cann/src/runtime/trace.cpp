// The trace of executed tasks, stored as JSON objects until they are fetched.
#include "runtime/trace.h"

#include <atomic>

#include "runtime/control.h"
#include "runtime/stream.h"

namespace emulator {

namespace {

struct Trace {
    std::atomic<bool> on{false};
    std::mutex mutex;
    std::string records;  // separated by commas
    std::string fetched;
};
Trace& trace() {
    static auto* only = new Trace;
    return *only;
}

const char* const kinds[] = {"kernel", "copy", "fill", "graph", "update", "prefetch", "host"};
const char* const accesses[] = {"read", "write", "read_write"};

void append(TraceKind kind, const std::string& name, const Stream& stream, const char* phase, size_t bytes,
            double flops, double microseconds, const std::string& operands, const Ranks& ranks = {}) {
    std::string members;
    if (ranks.count) {
        members = format(", \"communicator\": %s, \"rank\": %u, \"ranks\": %u", quoted(ranks.communicator).c_str(),
                         ranks.rank, ranks.count);
    }
    auto record =
        format(
            "{\"kind\": \"%s\", \"name\": %s, \"stream\": %d, \"device\": %d, \"phase\": \"%s\", \"bytes\": %zu, "
            "\"flops\": %.17g, \"microseconds\": %.3f, \"operands\": [",
            kinds[static_cast<int>(kind)], quoted(name).c_str(), stream.id, stream.device, phase, bytes, flops,
            microseconds) +
        operands + "]" + members + "}";
    std::lock_guard lock(trace().mutex);
    if (!trace().records.empty()) trace().records += ",\n";
    trace().records += record;
}

}  // namespace

std::string quoted(const std::string& text) {
    std::string result = "\"";
    for (char c : text) {
        if (c == '"' || c == '\\') result += '\\';
        if (static_cast<unsigned char>(c) >= ' ') {
            result += c;
        } else {
            result += c == '\n' ? "\\n" : " ";
        }
    }
    return result + '"';
}

bool tracing() { return trace().on.load(std::memory_order_relaxed); }

void trace_launch(TraceKind kind, const Launch& launch, const Stream& stream, const char* phase, double microseconds) {
    std::string operands;
    size_t bytes = 0;
    for (auto& operand : launch.operands) {
        bytes += operand.bytes;
        std::string shape;
        for (int64_t size : operand.shape) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
        operands += (operands.empty() ? "" : ", ") +
                    format("{\"shape\": [%s], \"dtype\": %d, \"bytes\": %zu, \"access\": \"%s\"}", shape.c_str(),
                           operand.dtype, operand.bytes, accesses[static_cast<int>(operand.access)]);
    }
    append(kind, launch.kernel, stream, phase, bytes, launch.flops, microseconds, operands, launch.ranks);
}

void trace_event(TraceKind kind, const std::string& name, const Context& context, size_t bytes) {
    if (tracing()) append(kind, name, context.stream, context.replay ? "replay" : "eager", bytes, 0, 0, "");
}

}  // namespace emulator

using namespace emulator;

extern "C" {

void emulated_cann_trace(int on) {
    std::lock_guard lock(trace().mutex);
    if (on) trace().records.clear();
    trace().on = on != 0;
}

const char* emulated_cann_trace_records() {
    std::lock_guard lock(trace().mutex);
    trace().fetched = "[" + trace().records + "]";
    return trace().fetched.c_str();
}

}  // extern "C"
