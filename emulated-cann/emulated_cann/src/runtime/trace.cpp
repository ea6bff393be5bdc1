// The trace of executed tasks, stored as JSON objects until they are fetched.
#include "runtime/trace.h"

#include <atomic>
#include <map>

#include "runtime/call_stack.h"
#include "runtime/control.h"
#include "runtime/graph.h"

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

// Names of CANN's data types (aclDataType): torch's names where they exist.
const std::map<int, const char*> dtypes = {
    {0, "float32"},        {1, "float16"},   {2, "int8"},       {3, "int32"},       {4, "uint8"},
    {6, "int16"},          {7, "uint16"},    {8, "uint32"},     {9, "int64"},       {10, "uint64"},
    {11, "float64"},       {12, "bool"},     {16, "complex64"}, {17, "complex128"}, {27, "bfloat16"},
    {29, "int4"},          {30, "uint1"},    {33, "complex32"}, {34, "hifloat8"},   {35, "float8_e5m2"},
    {36, "float8_e4m3fn"}, {37, "float8_e8m0fnu"},
};

double microseconds(std::chrono::steady_clock::duration duration) {
    return std::chrono::duration<double, std::micro>(duration).count();
}

struct Entry {
    TraceKind kind;
    const std::string& name;
    const Stream& stream;
    const char* phase;
    uint32_t graph = 0, call = 0;
    size_t bytes = 0;
    double flops = 0;
    std::string operands = "";
    Ranks ranks = {};
};

void append(const Entry& entry, TracePoint begin, double took) {
    const char* kind = kinds[static_cast<int>(entry.kind)];
    double start = microseconds(begin.time_since_epoch());
    auto members = format("\"phase\": \"%s\", \"graph\": %u, \"bytes\": %zu, \"flops\": %.17g, \"operands\": [",
                          entry.phase, entry.graph, entry.bytes, entry.flops);
    members += entry.operands + "]";
    if (entry.ranks.count) {
        members += format(", \"communicator\": %s, \"rank\": %u, \"ranks\": %u",
                          quoted(entry.ranks.communicator).c_str(), entry.ranks.rank, entry.ranks.count);
    }
    if (writing_trace() && entry.phase != std::string("capture")) {
        std::string frames;
        for (auto& frame : frames_of(entry.call)) frames += (frames.empty() ? "" : ", ") + quoted(frame);
        write_trace(kind, entry.name, entry.stream, start, took, "{" + members + ", \"python\": [" + frames + "]}");
    }
    std::lock_guard lock(trace().mutex);
    if (!trace().on) return;
    if (!trace().records.empty()) trace().records += ",\n";
    trace().records += format(
        "{\"kind\": \"%s\", \"name\": %s, \"stream\": %d, \"device\": %d, \"start\": %.3f, "
        "\"microseconds\": %.3f, ",
        kind, quoted(entry.name).c_str(), entry.stream.id, entry.stream.device, start, took);
    trace().records += members + "}";
}

Entry entry_of(TraceKind kind, const std::string& name, const Context& context) {
    Entry entry{kind, name, context.stream, context.replay ? "replay" : "eager"};
    if (context.replay) entry.graph = context.replay->root().graph->id;
    return entry;
}

void add_launch(Entry entry, const Launch& launch, TracePoint begin, double took) {
    for (auto& operand : launch.operands) {
        entry.bytes += operand.bytes;
        std::string shape;
        for (int64_t size : operand.shape) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
        auto dtype = dtypes.find(operand.dtype);
        entry.operands += (entry.operands.empty() ? "" : ", ") +
                          format("{\"shape\": [%s], \"dtype\": \"%s\", \"bytes\": %zu, \"access\": \"%s\"}",
                                 shape.c_str(), dtype == dtypes.end() ? "?" : dtype->second, operand.bytes,
                                 accesses[static_cast<int>(operand.access)]);
    }
    entry.flops = launch.flops;
    entry.ranks = launch.ranks;
    entry.call = launch.call;
    append(entry, begin, took);
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

bool tracing() { return trace().on.load(std::memory_order_relaxed) || writing_trace(); }

void trace_launch(TraceKind kind, const Launch& launch, const Context& context, TracePoint begin) {
    if (!tracing()) return;
    add_launch(entry_of(kind, launch.kernel, context), launch, begin,
               microseconds(std::chrono::steady_clock::now() - begin));
}

void trace_capture(TraceKind kind, const Launch& launch, const Stream& stream) {
    if (tracing()) add_launch({kind, launch.kernel, stream, "capture"}, launch, std::chrono::steady_clock::now(), 0);
}

void trace_event(TraceKind kind, const std::string& name, const Context& context, size_t bytes, TracePoint begin,
                 uint32_t call) {
    if (!tracing()) return;
    auto entry = entry_of(kind, name, context);
    entry.bytes = bytes;
    entry.call = call;
    append(entry, begin, microseconds(std::chrono::steady_clock::now() - begin));
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
