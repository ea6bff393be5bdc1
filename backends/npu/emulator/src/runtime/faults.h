// Faults on demand: see control.h.
#pragma once

#include <string>

namespace emulator {

enum class Fault { malloc, launch, execution, hang, delay, stream, copy };

struct Injection {
    int code = 0;
    int milliseconds = 0;
    int number = 0;
};

// Counts one occasion, and says whether it is to fail. Takes no lock but its own.
bool fault_at(Fault kind, const std::string& name = "", Injection* injection = nullptr);
// Waits for the time that the fault says, or until it is withdrawn.
void wait_out(const Injection& injection);
// The shorter of that time and the limit that aclrtSetOpExecuteTimeOut set; see settings.cpp.
int within_execution_limit(int milliseconds);

}  // namespace emulator
