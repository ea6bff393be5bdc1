#include "runtime/lock.h"

#include <dlfcn.h>

#include <chrono>
#include <mutex>
#include <thread>

namespace emulated {

namespace {

std::recursive_timed_mutex& mutex() {
    static auto* only = new std::recursive_timed_mutex;  // not destroyed: torch calls CUDA while the process ends
    return *only;
}

template <class Function>
Function find(const char* name) {
    return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

// Python's functions, if the process is one of Python's.
struct Python {
    int (*is_initialized)() = find<int (*)()>("Py_IsInitialized");
    int (*holds_lock)() = find<int (*)()>("PyGILState_Check");
    void* (*save_thread)() = find<void* (*)()>("PyEval_SaveThread");
    void (*restore_thread)(void*) = find<void (*)(void*)>("PyEval_RestoreThread");

    bool locked_here() const { return is_initialized && is_initialized() && holds_lock(); }
};

}  // namespace

Lock::Lock() {
    static const Python python;
    while (!mutex().try_lock_for(std::chrono::microseconds(100))) {
        if (!python.locked_here()) continue;
        void* thread = python.save_thread();
        std::this_thread::sleep_for(std::chrono::microseconds(100));
        python.restore_thread(thread);
    }
}

Lock::~Lock() { mutex().unlock(); }

}  // namespace emulated
