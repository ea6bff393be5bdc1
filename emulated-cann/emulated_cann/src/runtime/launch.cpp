// Kernel launches.
#include "runtime/launch.h"

#include "runtime/faults.h"
#include "runtime/memory.h"
#include "runtime/races.h"
#include "runtime/stream.h"
#include "runtime/trace.h"

DOCUMENTED(
    "runtime: docs/zh/api_ref/12_execution_control.md"
    "; runtime: docs/zh/api_ref/11-06_CMO_memory_operation.md");

namespace emulator {

namespace {

struct KernelTask : Task {
    explicit KernelTask(Launch launch, TraceKind kind) : launch(std::move(launch)), kind(kind) {}
    Launch launch;
    TraceKind kind;
    // Of the current execution.
    bool begun = false, complete = false;
    std::string problem;
    TracePoint begin;

    bool ready(const Context&) override { return !launch.ready || launch.ready(); }
    bool waits_outside() const override { return static_cast<bool>(launch.ready); }
    bool unfinished() override { return begun && !complete; }

    void run(const Context& context) override {
        if (!launch.ended) return execute(context);
        try {
            execute(context);
        } catch (const std::exception& error) {
            problem = error.what();
            throw;
        }
    }

    void finish(const Context&) override {
        if (launch.ended) {
            if (problem.empty()) problem = "it was skipped because of an earlier failure";
            launch.ended(complete ? nullptr : problem.c_str());
            problem.clear();
        }
        begun = complete = false;
    }

    void execute(const Context& context) {
        if (!begun) {
            begun = true;
            access_memory(context, launch.kernel, launch.call, launch.operands);
            if (launch.ranks.count) release_by_name(launch.ranks.communicator, context);
            check_operands(context.stream.device);
            inject_faults();
            begin = std::chrono::steady_clock::now();
        }
        launch.run();
        complete = !launch.unfinished || !launch.unfinished();
        if (complete && launch.ranks.count) acquire_by_name(launch.ranks.communicator, context);
        if (complete) trace_launch(kind, launch, context, begin);
    }

    void inject_faults() const {
        Injection injection;
        if (fault_at(Fault::delay, launch.kernel, &injection)) wait_out(injection);
        if (fault_at(Fault::hang, launch.kernel, &injection)) {
            injection.milliseconds = within_execution_limit(injection.milliseconds);
            wait_out(injection);
            throw DeviceError(ACL_ERROR_RT_AICORE_TIMEOUT,
                              launch.kernel + " exceeded its time limit (a hang injected by emulated_cann.faults)");
        }
        if (fault_at(Fault::execution, launch.kernel, &injection)) {
            OURS("the program injects it with emulated_cann.faults");
            throw DeviceError(injection.code, launch.kernel + ": fault injected by emulated_cann.faults");
        }
    }

    void check_operands(int device) const {
        UNDEFINED("hardware may fault, or read or write other data");
        for (auto& operand : launch.operands) {
            auto reason = objection(operand.address, operand.bytes, device);
            if (reason.empty()) continue;
            const char* verb = operand.access == Access::read ? "reads" : "writes";
            throw DeviceError(ACL_ERROR_RT_AICORE_EXCEPTION, format("%s %s %zu bytes at %p: ", launch.kernel.c_str(),
                                                                    verb, operand.bytes, operand.address) +
                                                                 reason);
        }
    }

    std::string name() const override { return launch.kernel; }
    bool is_kernel() const override { return kind == TraceKind::kernel; }
};

}  // namespace

int launch_as(TraceKind kind, aclrtStream handle, Launch launch) {
    Injection injection;
    if (fault_at(Fault::launch, launch.kernel, &injection)) {
        OURS("the program injects it with emulated_cann.faults");
        return fail(injection.code, "launching " + launch.kernel + ": fault injected by emulated_cann.faults");
    }
    if (!launch.call) launch.call = call_stack();
    auto task = std::make_shared<KernelTask>(std::move(launch), kind);
    Lock lock(machine().mutex);
    auto stream = find_stream(handle);
    if (!stream) return no_such_stream(handle);
    int code = submit(*stream, task);
    if (!code && stream->capture) trace_capture(kind, task->launch, *stream);
    return code;
}

bool state_of(aclrtStream handle, StreamState* state) {
    Lock lock(machine().mutex);
    auto stream = find_stream(handle);
    if (stream) *state = {stream->device, stream->capture || stream->updated_group};
    return stream != nullptr;
}

int launch(aclrtStream stream, Launch launch) { return launch_as(TraceKind::kernel, stream, std::move(launch)); }

}  // namespace emulator

using namespace emulator;

extern "C" {

// Moves data between memory and cache. The emulator has no cache, so it only checks and traces the call.
aclError aclrtCmoAsync(void* address, size_t size, aclrtCmoType type, aclrtStream stream) {
    static const char* const names[] = {"CmoPrefetch", "CmoWriteback", "CmoInvalid", "CmoFlush"};
    if (type < ACL_RT_CMO_TYPE_PREFETCH || type > ACL_RT_CMO_TYPE_FLUSH) {
        return fail(ACL_ERROR_RT_PARAM_INVALID, format("%d is not a value of aclrtCmoType", static_cast<int>(type)));
    }
    Launch launch{.kernel = names[type],
                  .operands = {{address, size, Access::read, ACL_UINT8, {static_cast<int64_t>(size)}}}};
    launch.run = [] {};
    return launch_as(TraceKind::prefetch, stream, std::move(launch));
}

}  // extern "C"
