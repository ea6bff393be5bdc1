// What streams and graphs are made of.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/machine.h"

namespace emulator {

struct Replay;

// Where a task runs: on a stream, and, if a graph is replayed, in that replay. A captured task runs in many.
struct Context {
    Stream& stream;
    Replay* replay = nullptr;
};

// A task in the dump of a graph: its name and CANN's word for what it is. Events and values that go together have names
// that end with one number, by which torch_npu pairs them.
struct Dumped {
    std::string name, type;
};

class Task {
  public:
    virtual ~Task() = default;
    // May it start? Asked with the lock held, again whenever something ended.
    virtual bool ready(const Context&) { return true; }
    // The work, without the lock. Throws DeviceError, or anything else for an exception in the kernel.
    virtual void run(const Context&) {}
    // With the lock held, after `run`, also if `run` failed or was left out because of an earlier failure.
    virtual void finish(const Context&) {}
    virtual std::string name() const = 0;
    virtual bool is_kernel() const { return false; }
    virtual std::vector<Dumped> dumped() const { return {{name(), is_kernel() ? "KERNEL_AICORE" : name()}}; }
    // A graph to replay in this task's place. With the lock held; null once it is over.
    virtual Replay* replay(const Context&) { return nullptr; }
};
using TaskPointer = std::shared_ptr<Task>;

}  // namespace emulator
