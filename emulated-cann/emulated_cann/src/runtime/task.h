// Tasks, the elements of streams and graphs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/machine.h"
#include "runtime/times.h"

namespace emulator {

struct Replay;

// The stream and, in a replay, the replay in which a task runs. A captured task runs in many replays.
struct Context {
    Stream& stream;
    Replay* replay = nullptr;
    size_t lane = 0;  // of the replay
};

// A task in the dump of a graph: its name and CANN's task type. The names of a record and its waits end with the same
// number, by which torch_npu pairs them.
struct Dumped {
    std::string name, type;
};

class Task {
  public:
    virtual ~Task() = default;
    // Returns whether the task can start. Called with the lock held, and again whenever a task ends.
    virtual bool ready(const Context&) { return true; }
    // Executes the task, without the lock. Throws DeviceError, or another exception for an error in the kernel.
    virtual void run(const Context&) {}
    // Returns whether `run` does nothing: the task only orders others. Any thread may then complete it.
    virtual bool is_instant() const { return false; }
    // Returns whether `run` must be called again, once `ready` permits it, before the task is finished. Called with the
    // lock held after a `run` that did not fail.
    virtual bool unfinished() { return false; }
    // Returns whether the task, while it is not ready, waits for another process, which ends in any case.
    virtual bool waits_outside() const { return false; }
    // Called with the lock held after `run`, also if `run` failed or was skipped because of an earlier failure.
    virtual void finish(const Context&) {}
    virtual std::string name() const = 0;
    virtual bool is_kernel() const { return false; }
    virtual std::vector<Dumped> dumped() const { return {{name(), is_kernel() ? "KERNEL_AICORE" : name()}}; }
    // Returns the replay that this task stands for, or null if there is none. Called with the lock held.
    virtual Replay* replay(const Context&) { return nullptr; }

    std::shared_ptr<const Times> issued;  // what is ordered before its submission, if races are looked for
};
using TaskPointer = std::shared_ptr<Task>;

}  // namespace emulator
