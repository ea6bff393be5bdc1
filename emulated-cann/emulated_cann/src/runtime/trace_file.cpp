// Trace events in a file, which Perfetto and chrome://tracing read. A device is a process of the file and a stream is a
// thread. All processes of a program write to one file, whose list is complete after every write.
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cstdlib>
#include <set>

#include "runtime/call_stack.h"
#include "runtime/control.h"
#include "runtime/memory.h"
#include "runtime/stream.h"
#include "runtime/trace.h"

namespace emulator {

namespace {

constexpr size_t most_kept = 1 << 20;  // bytes between writes
constexpr const char* end_of_list = "\n]\n";

struct File {
    std::atomic<bool> is_open{false};
    std::mutex mutex;
    std::string path, events;
    std::set<std::pair<int, int>> named;  // devices and streams
};
File& file() {
    static auto* only = new File;
    return *only;
}

// The functions below require the mutex.

void add(const std::string& event) {
    if (!file().events.empty()) file().events += ",\n";
    file().events += event;
}

void name(const char* what, int process, int thread, const std::string& text) {
    add(format("{\"ph\": \"M\", \"name\": \"%s\", \"pid\": %d, \"tid\": %d, \"args\": {\"name\": %s}}", what, process,
               thread, quoted(text).c_str()));
}

// Replaces the end of the list by the events.
void write_events() {
    int descriptor = file().events.empty() ? -1 : open(file().path.c_str(), O_RDWR | O_CLOEXEC);
    if (descriptor < 0) return;
    flock(descriptor, LOCK_EX);
    off_t end = lseek(descriptor, -static_cast<off_t>(std::string(end_of_list).size()), SEEK_END);
    auto text = (end > 1 ? ",\n" : "\n") + file().events + end_of_list;
    for (size_t done = 0; end > 0 && done < text.size();) {
        ssize_t count = write(descriptor, text.data() + done, text.size() - done);
        if (count <= 0) break;
        done += static_cast<size_t>(count);
    }
    close(descriptor);
    file().events.clear();
}

}  // namespace

bool writing_trace() { return file().is_open.load(std::memory_order_relaxed); }

void write_trace(const char* kind, const std::string& title, const Stream& stream, double start, double microseconds,
                 const std::string& arguments) {
    std::lock_guard lock(file().mutex);
    int process = getpid() * max_devices + stream.device, thread = stream.id + 1;
    if (file().named.emplace(stream.device, -2).second)
        name("process_name", process, 0, format("device %d of process %d", stream.device, getpid()));
    if (file().named.emplace(stream.device, stream.id).second)
        name("thread_name", process, thread, stream.id < 0 ? "host" : format("stream %d", stream.id));
    add(format("{\"ph\": \"X\", \"cat\": \"%s\", \"name\": %s, \"pid\": %d, \"tid\": %d, \"ts\": %.3f, \"dur\": %.3f, "
               "\"args\": ",
               kind, quoted(title).c_str(), process, thread, start, microseconds) +
        arguments + "}");
    if (file().events.size() > most_kept) write_events();
}

void flush_trace() {
    std::lock_guard lock(file().mutex);
    write_events();
}

}  // namespace emulator

using namespace emulator;

extern "C" void emulated_cann_trace_to(const char* path) {
    file().path = path;
    file().is_open = true;
    record_calls(true);
    std::atexit(flush_trace);
}
