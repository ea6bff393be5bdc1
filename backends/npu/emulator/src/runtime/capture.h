// Captures: streams whose tasks go into a graph. With the machine's lock held, but for `refuse_while_capturing`.
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
    Failure invalid;  // why the graph cannot be had
};

// Takes the stream into the capture; into a lane of its own, or into lane 0.
int enter(Stream& stream, const std::shared_ptr<Capture>& capture, bool new_lane);
// Records the task in the graph that the stream is captured into.
int record(Stream& stream, TaskPointer task);
// Records, in a captured stream, an event that other captured streams wait for.
int record_edge(Stream& stream, const std::shared_ptr<Event>& event);
// Draws a stream into the capture that recorded the event; see event.h.
int join(Stream& stream, const std::shared_ptr<Capture>& capture, size_t edge);
// A stream whose work lane 0 does not wait for; null if there is none.
Stream* unjoined(Capture& capture);

// Fails, and the capture is invalid: it goes on, what it captures is dropped, and its end fails. CANN does so where it
// could not capture what it was given. A call that it refuses because a stream is captured leaves the capture as it was.
int invalidate(Capture& capture, int code, const std::string& reason);
// Fails because the capture was invalidated before.
int refuse_invalid(Capture& capture);
// Refuses a call that would wait for a captured stream.
int refuse_if_captured(Stream& stream, const char* action);
// Refuses, with `code`, a call that CANN calls unsafe while this thread, or in global mode any thread, captures. Takes
// the lock.
int refuse_while_capturing(const char* function, int code = ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT);

}  // namespace emulator
