#include "hccl/waiting.h"

#include <algorithm>

#include "hccl/data_types.h"

UNDEFINED("hardware may hang, or compute with data of another call");

namespace emulator {

namespace {

// A wait looks for lost ranks no more often, so that short ones cost no system call.
constexpr auto look_interval = std::chrono::milliseconds(2);

// What a rank was last seen to call, for errors.
std::string last_call(const Communicator& communicator, uint32_t rank) {
    Member& member = communicator.member(rank);
    uint64_t last = std::max(member.posted[0].load(), member.posted[1].load());
    if (!last) return format("rank %u has called no collective yet", rank);
    const Call& call = communicator.outbox(rank).posted[(last - 1) % slots].call;
    return format("rank %u last called %s, its collective %lu", rank, describe(call).c_str(),
                  static_cast<unsigned long>(last));
}

}  // namespace

void fail_all(Communicator& communicator, uint64_t number, int code, const std::string& reason) {
    communicator.break_off(number, reason);
    throw DeviceError(code, "communicator " + communicator.name +
                                format(", rank %u of %u: ", communicator.rank, communicator.ranks) + reason);
}

bool Wait::is_expired(const Communicator& communicator) const {
    return communicator.limit.count() > 0 && std::chrono::steady_clock::now() - start > communicator.limit;
}

bool Wait::over(const Communicator& communicator, uint64_t number, int lacking) {
    if (lacking < 0 || !communicator.why_broken(number).empty()) return true;
    auto now = std::chrono::steady_clock::now();
    if (!started) {
        started = true;
        start = looked = now;
        return false;
    }
    if (now - looked < look_interval) return false;
    if (!communicator.lost(lacking).empty() || is_expired(communicator)) return true;
    looked = now;
    return false;
}

bool Wait::check(Communicator& communicator, const std::function<std::string()>& call, uint64_t number,
                 const std::function<int()>& lacking) {
    if (auto reason = communicator.why_broken(number); !reason.empty()) {
        OURS("ranks would otherwise pair this call with another one");
        throw DeviceError(lost_rank, "communicator " + communicator.name + ": " + call() + ", but it cannot succeed: " + reason);
    }
    const int other = lacking();
    if (other < 0) {
        started = false;
        return true;
    }
    std::string text = call() + ", but ";
    if (auto reason = communicator.lost(other); !reason.empty()) {
        if (lacking() != other) return false;
        communicator.error = HCCL_E_REMOTE;
        fail_all(communicator, number, lost_rank, text + reason);
    }
    if (started && is_expired(communicator)) {
        DOCUMENTED("hccl: docs/zh/user_guide/hccl_env/HCCL_EXEC_TIMEOUT.md");
        fail_all(communicator, number, too_late,
                 text + format("waited longer than HCCL_EXEC_TIMEOUT, %.3g s, for rank %d: ",
                               communicator.limit.count(), other) +
                     last_call(communicator, other));
    }
    return false;
}

int submit_waiting(const CommunicatorPointer& communicator, aclrtStream stream, Launch launch) {
    StreamState state;
    std::string kernel = launch.kernel;
    bool is_live = state_of(stream, &state);
    if (is_live && state.device != communicator->device) {
        UNDEFINED("hardware would access the memory of the other device, or fail");
        return fail(HCCL_E_PARA, kernel + format(": the stream is on device %d, and the communicator %s on device %d",
                                                 state.device, communicator->name.c_str(), communicator->device));
    }
    if (is_live && !state.captured) {
        ++communicator->pending;
        launch.ended = [communicator, ended = std::move(launch.ended)](const char* problem) {
            ended(problem);
            --communicator->pending;
        };
    }
    int code = emulator::launch(stream, std::move(launch));
    if (code && !state.captured) {
        if (is_live) --communicator->pending;
        abandon(*communicator, communicator->next, kernel.c_str(), "it could not be launched");
    }
    return code;
}

void abandon(Communicator& communicator, uint64_t number, const char* kernel, const char* problem) {
    communicator.break_off(number, format("rank %u did not complete %s: %s", communicator.rank, kernel, problem));
}

}  // namespace emulator
