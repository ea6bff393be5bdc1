// Host functions that a stream calls.
#include <condition_variable>
#include <deque>

#include "runtime/races.h"
#include "runtime/scheduler.h"
#include "runtime/trace.h"

DOCUMENTED("runtime: docs/zh/api_ref/12_execution_control.md; runtime: docs/zh/api_ref/25-01_aclError.md");

namespace emulator {

namespace {

// For aclrtLaunchHostFunc: the stream's worker calls the function.
struct HostTask : Task {
    HostTask(aclrtHostFunc function, void* argument) : function(function), argument(argument) {}
    aclrtHostFunc function;
    void* argument;
    void run(const Context& context) override {
        auto begin = std::chrono::steady_clock::now();
        run_on_host(context);
        function(argument);
        run_on_host(context);
        trace_event(TraceKind::host, name(), context, 0, begin);
    }
    std::string name() const override { return "HostFunction"; }
    std::vector<Dumped> dumped() const override { return {{"HOSTFUNC_CALLBACK", "HOSTFUNC_CALLBACK"}}; }
};

// For aclrtLaunchCallback: the thread that subscribed to the stream calls the function in aclrtProcessReport.
struct Report {
    aclrtCallback function;
    void* argument;
    bool done = false;
};
struct Reports {  // guarded by the machine's lock
    std::map<Stream*, uint64_t> subscribers;
    std::map<uint64_t, std::deque<std::shared_ptr<Report>>> waiting;  // by thread
};
Reports& reports() {
    static auto* only = new Reports;
    return *only;
}

struct CallbackTask : Task {
    CallbackTask(aclrtCallback function, void* argument, bool blocks, uint64_t thread)
        : function(function), argument(argument), blocks(blocks), thread(thread) {}
    aclrtCallback function;
    void* argument;
    bool blocks;
    uint64_t thread;
    void run(const Context& context) override {
        auto begin = std::chrono::steady_clock::now();
        run_on_host(context);
        auto report = std::make_shared<Report>(Report{function, argument});
        Lock lock(machine().mutex);
        reports().waiting[thread].push_back(report);
        machine().progress.notify_all();
        if (blocks) machine().progress.wait(lock, [&] { return report->done; });
        run_on_host(context);
        lock.unlock();
        trace_event(TraceKind::host, name(), context, 0, begin);
    }
    std::string name() const override { return "HostCallback"; }
};

}  // namespace

}  // namespace emulator

using namespace emulator;

extern "C" {

aclError aclrtLaunchHostFunc(aclrtStream handle, aclrtHostFunc function, void* argument) {
    Lock lock(machine().mutex);
    auto stream = find_stream(handle);
    return stream ? submit(*stream, std::make_shared<HostTask>(function, argument)) : no_such_stream(handle);
}

aclError aclrtSubscribeReport(uint64_t thread, aclrtStream handle) {
    Lock lock(machine().mutex);
    auto stream = find_stream(handle);
    if (!stream) return no_such_stream(handle);
    if (!reports().subscribers.emplace(stream.get(), thread).second) {
        return fail(ACL_ERROR_RT_STREAM_SUBSCRIBE,
                    format("stream %d must not have a subscribed thread already", stream->id));
    }
    return ACL_SUCCESS;
}

aclError aclrtUnSubscribeReport(uint64_t, aclrtStream handle) {
    Lock lock(machine().mutex);
    auto stream = find_stream(handle);
    if (!stream) return no_such_stream(handle);
    if (reports().subscribers.erase(stream.get())) return ACL_SUCCESS;
    return fail(ACL_ERROR_RT_STREAM_NO_CB_REG, format("no thread has subscribed to stream %d", stream->id));
}

aclError aclrtLaunchCallback(aclrtCallback function, void* argument, aclrtCallbackBlockType type, aclrtStream handle) {
    Lock lock(machine().mutex);
    auto stream = find_stream(handle);
    if (!stream) return no_such_stream(handle);
    auto subscriber = reports().subscribers.find(stream.get());
    if (subscriber == reports().subscribers.end()) {
        return fail(ACL_ERROR_RT_STREAM_NO_CB_REG,
                    format("no thread has subscribed to stream %d; call aclrtSubscribeReport first", stream->id));
    }
    return submit(*stream,
                  std::make_shared<CallbackTask>(function, argument, type == ACL_CALLBACK_BLOCK, subscriber->second));
}

aclError aclrtProcessReport(int32_t milliseconds) {
    Lock lock(machine().mutex);
    auto& waiting = reports().waiting[static_cast<uint64_t>(pthread_self())];
    // Does not start a seeded schedule, because this thread serves the streams and does not wait for their work.
    auto has_report = [&] { return !waiting.empty(); };
    auto limit = std::chrono::milliseconds(milliseconds);
    if (milliseconds < 0) {
        machine().progress.wait(lock, has_report);
    } else if (!machine().progress.wait_for(lock, limit, has_report)) {
        return fail(ACL_ERROR_RT_REPORT_TIMEOUT,
                    format("no callback arrived within the timeout of %d ms", milliseconds));
    }
    auto report = waiting.front();
    waiting.pop_front();
    lock.unlock();
    report->function(report->argument);
    lock.lock();
    report->done = true;
    machine().progress.notify_all();
    return ACL_SUCCESS;
}

}  // extern "C"
