// Fault injection; see control.h.
#pragma once

#include <string>

namespace emulator {

enum class Fault { malloc, launch, execution, hang, delay, stream, copy };

struct Injection {
    int code = 0;
    int milliseconds = 0;
    int number = 0;
};

// Counts one call, and returns whether it must fail. Takes only its own lock.
bool fault_at(Fault kind, const std::string& name = "", Injection* injection = nullptr);
// Waits for the duration of the fault, or until it is removed.
void wait_out(const Injection& injection);
// Returns the smaller of a duration and the limit of aclrtSetOpExecuteTimeOut; see settings.cpp.
int within_execution_limit(int milliseconds);

}  // namespace emulator
