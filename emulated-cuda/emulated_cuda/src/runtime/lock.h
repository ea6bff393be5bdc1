// One lock for the whole machine: correct before fast.
#pragma once

namespace emulated {

// Held by every call of CUDA's, and while work runs. Work may be a function of Python's, which takes Python's own lock;
// so a thread that holds that one lets go of it while it waits here.
class Lock {
  public:
    Lock();
    ~Lock();
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;
};

}  // namespace emulated
