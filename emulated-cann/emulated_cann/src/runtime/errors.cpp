// The last error of each thread, its message, and the state after an error on torch_npu's task queue.
#include "runtime/errors.h"

#include <pthread.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <utility>

namespace emulator {

namespace {

// Never destroyed, because threads of torch_npu may fail while the process exits.
struct ThreadErrors {
    std::string pending, returned;
    int last = 0;
};
ThreadErrors& errors() {
    thread_local auto* mine = new ThreadErrors;
    return *mine;
}

std::atomic<uint64_t> failed{0};
std::atomic<const std::string*> queue_stopped{nullptr};  // the reason; set once, never destroyed

// Returns whether this is the thread that launches for TASK_QUEUE_ENABLE=1 and 2, by torch_npu's name for it.
bool on_task_queue() {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof(name));
    return std::strcmp(name, "acl_thread") == 0;
}

}  // namespace

uint64_t failures() { return failed; }

int refuse_after_task_queue() {
    const std::string* why = queue_stopped;
    return why && !on_task_queue() ? fail(ACL_ERROR_RT_INTERNAL_ERROR, *why) : int{ACL_SUCCESS};
}

int fail(int code, const std::string& reason) {
    ++failed;
    if (!queue_stopped && on_task_queue()) {
        auto* why = new std::string(format("torch_npu's task queue stopped at error %d: ", code) + reason +
                                    ". It drops all later work; set TASK_QUEUE_ENABLE=0 to continue after an error");
        const std::string* none = nullptr;
        if (!queue_stopped.compare_exchange_strong(none, why)) delete why;
    }
    errors().pending = format("[emulated CANN] %d: ", code) + reason;  // replaces an earlier message that was not read
    errors().last = code;
    return code;
}

uint64_t host_thread() {
    static std::atomic<uint64_t> threads{0};
    thread_local uint64_t mine = on_task_queue() ? 0 : ++threads;
    return mine;
}

int report(const Failure& failure, bool lost) {
    if (!failure || (failure.reported() && !lost) || !failure.reported_to->insert(host_thread()).second)
        return ACL_SUCCESS;
    return fail(failure.code, failure.reason);
}

std::string format(const char* text, ...) {
    va_list arguments, again;
    va_start(arguments, text);
    va_copy(again, arguments);
    std::string result(vsnprintf(nullptr, 0, text, arguments), '\0');
    vsnprintf(result.data(), result.size() + 1, text, again);
    va_end(arguments);
    va_end(again);
    return result;
}

}  // namespace emulator

using namespace emulator;

extern "C" {

// Returns each message once, as CANN does.
const char* aclGetRecentErrMsg() {
    errors().returned.swap(errors().pending);
    errors().pending.clear();
    return errors().returned.empty() ? nullptr : errors().returned.c_str();
}

aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return errors().last; }

aclError aclrtGetLastError(aclrtLastErrLevel) { return std::exchange(errors().last, 0); }

}  // extern "C"
