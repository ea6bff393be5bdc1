// Captures of streams into graphs. All functions except `refuse_while_capturing` require the machine's lock.
#pragma once

#include <thread>

#include "runtime/graph.h"

namespace emulator {

struct Capture {
    std::shared_ptr<Graph> graph;
    aclmdlRICaptureMode mode;
    std::thread::id thread;
    Stream* origin;
    std::vector<Stream*> streams;
    Failure invalid;  // the error that invalidated the capture
};

// Adds the stream to the capture, in a new lane or in lane 0.
int enter(Stream& stream, const std::shared_ptr<Capture>& capture, bool new_lane);
// Adds the task to the graph of the stream's capture.
int record(Stream& stream, TaskPointer task);
// Records an event in a captured stream, for other streams of the capture.
int record_edge(Stream& stream, const std::shared_ptr<Event>& event);
// Makes a stream wait for an event of the capture. The stream joins the capture if it is not part of it; see event.h.
int join(Stream& stream, const std::shared_ptr<Capture>& capture, size_t edge);
// Returns a stream with work that lane 0 does not wait for, or null.
Stream* unjoined(Capture& capture);

// Fails and invalidates the capture. The capture continues, drops all further tasks, and fails at its end. CANN does so
// for work that it cannot capture. Calls that it refuses because a stream is captured do not change the capture.
int invalidate(Capture& capture, int code, const std::string& reason);
// Fails because the capture is invalid.
int refuse_invalid(Capture& capture);
// Refuses a call that would synchronize with a captured stream.
int refuse_if_captured(Stream& stream, const char* action);
// Refuses, with `code`, a call that is unsafe by CANN's documents while this thread captures, or any thread in global
// mode. Takes the lock.
int refuse_while_capturing(const char* function, int code = ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT);

}  // namespace emulator
