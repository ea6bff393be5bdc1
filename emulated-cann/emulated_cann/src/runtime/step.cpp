#include "runtime/step.h"

#include "runtime/races.h"

namespace emulator {

namespace {

bool skipping(const Stream& stream, Replay* replay) {
    if (stream.failure && stream.stop_on_failure) return true;
    return replay && replay->root().failure;
}

// Appends the runnable steps that `self` stands for: itself, or those of the graph that it replays. Returns whether one of
// them waits for another process.
bool append_runnable(const Step& self, std::vector<Step>& steps) {
    Context context{*self.stream, self.replay, self.lane};
    bool skip = skipping(*self.stream, self.replay), outside = false;
    if (!skip && !self.task->ready(context)) return self.task->waits_outside();
    Replay* child = skip ? nullptr : self.task->replay(context);
    if (child) fork_lanes(context, *child);
    if (!child || child->over()) {
        steps.push_back(self);
        return false;
    }
    for (size_t lane = 0; lane < child->lanes.size(); ++lane) {
        size_t next = child->lanes[lane].next;
        auto& tasks = child->graph->lanes[lane].tasks;
        if (next < tasks.size())
            outside |= append_runnable({self.stream, child, lane, tasks[next], mix(self.order + lane + 1)}, steps);
    }
    return outside;
}

// Records the completion or failure of a step.
void end(Step& step, bool skip, Failure& failure) {
    Stream& stream = *step.stream;
    Context context{stream, step.replay, step.lane};
    if (!step.replay) begin_in_order(stream, *step.task);  // of a task without `run`
    if (failure) {
        failure.reason = format("on stream %d of device %d: ", stream.id, stream.device) + failure.reason;
        failure.reported_to = std::make_shared<std::set<uint64_t>>();
        Failure& kept = step.replay ? step.replay->root().failure : stream.failure;
        if (!kept) kept = failure;
    }
    bool failed_before = bool(stream.failure) && !failure;
    step.task->finish(context);
    if (step.replay) {
        auto& lane = step.replay->lanes[step.lane];
        if (lane.child) join_lanes(*lane.child);
        lane.child.reset();
        ++lane.next;
    } else {
        uint64_t thread = stream.submitters.front();
        if (thread && stream.failure && (skip || !failed_before))
            stream.losses.insert_or_assign(thread, stream.failure);
        stream.queue.pop_front();
        stream.submitters.pop_front();
        ++stream.completed;
        end_failure(stream);
    }
}

}  // namespace

uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

bool append_runnable(Stream& stream, std::vector<Step>& steps) {
    if (stream.busy || stream.queue.empty()) return false;
    return append_runnable({&stream, nullptr, 0, stream.queue.front(), mix(stream.ordinal)}, steps);
}

size_t complete_instants(Stream& stream, std::vector<Step>& steps) {
    for (size_t count = 0;; ++count) {
        steps.clear();
        append_runnable(stream, steps);
        if (steps.empty() || !steps.front().task->is_instant()) return count;
        Failure none;
        end(steps.front(), skipping(stream, steps.front().replay), none);
    }
}

void run_step(Lock& lock, Step& step) {
    Stream& stream = *step.stream;
    Context context{stream, step.replay, step.lane};
    Failure failure;
    bool skip = skipping(stream, step.replay);
    if (step.task->is_instant()) return end(step, skip, failure);
    stream.busy = true;
    if (!step.replay) begin_in_order(stream, *step.task);
    lock.unlock();
    if (!skip) {
        try {
            step.task->run(context);
        } catch (const DeviceError& error) {
            failure = {error.code, error.what()};
        } catch (const std::exception& error) {
            failure = {ACL_ERROR_RT_AICORE_EXCEPTION, step.task->name() + ": " + error.what()};
        } catch (...) {
            failure = {ACL_ERROR_RT_AICORE_EXCEPTION,
                       step.task->name() + " threw an exception that is not a std::exception"};
        }
    }
    lock.lock();
    stream.busy = false;
    if (!skip && !failure && step.task->unfinished()) return;
    end(step, skip, failure);
}

}  // namespace emulator
