// aclGetRecentErrMsg, the last error of a thread, and what an error leaves behind.
#include "runtime/errors.h"

#include <pthread.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <utility>

namespace emulator {

namespace {

// Leaked: threads of torch_npu may still fail while the process exits.
struct ThreadErrors {
    std::string pending, handed_out;
    int last = 0;
};
ThreadErrors& errors() {
    thread_local auto* mine = new ThreadErrors;
    return *mine;
}

std::atomic<uint64_t> failed{0};
std::atomic<const std::string*> queue_stopped{nullptr};  // why; set once, and leaked

// torch_npu names the thread that launches for TASK_QUEUE_ENABLE=1 and 2.
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
                                    ". It drops all later work: run with TASK_QUEUE_ENABLE=0 to go on after a refusal");
        const std::string* none = nullptr;
        if (!queue_stopped.compare_exchange_strong(none, why)) delete why;
    }
    errors().pending = format("[emulated CANN] %d: ", code) + reason;  // the last one: earlier ones were dealt with
    errors().last = code;
    return code;
}

uint64_t host_thread() {
    static std::atomic<uint64_t> threads{0};
    thread_local uint64_t mine = on_task_queue() ? 0 : ++threads;
    return mine;
}

int report(const Failure& failure, bool lost) {
    if (!failure || (failure.reported() && !lost) || !failure.told->insert(host_thread()).second) return ACL_SUCCESS;
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

// As CANN does, the message is handed out once.
const char* aclGetRecentErrMsg() {
    errors().handed_out.swap(errors().pending);
    errors().pending.clear();
    return errors().handed_out.empty() ? nullptr : errors().handed_out.c_str();
}

aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return errors().last; }

aclError aclrtGetLastError(aclrtLastErrLevel) { return std::exchange(errors().last, 0); }

}  // extern "C"
