// Groups of calls, and the arguments of interfaces.
#include "hccl/interface.h"

#include <algorithm>
#include <cstring>
#include <utility>

DOCUMENTED("hccl: docs/zh/api_ref/comm_op_interface/README.md");

namespace emulator {

namespace {

struct Group {
    int depth = 0;
    GroupKind kind = GroupKind::none;
    std::vector<HcclResult (*)()> ends;
};
thread_local Group group;

}  // namespace

CommunicatorPointer communicator_of(HcclComm handle, const char* interface) {
    auto found = find_communicator(handle);
    if (!found) throw HcclError(HCCL_E_PARA, std::string(interface) + format(": %p is not a live communicator", handle));
    return found;
}

Call call_of(const char* interface, uint64_t count, HcclDataType dtype) {
    Call call;
    std::strncpy(call.name, interface, sizeof(call.name) - 1);
    call.count = count;
    call.dtype = dtype;
    return call;
}

Call call_of(const char* interface, uint64_t count, HcclDataType dtype, HcclReduceOp reduction) {
    Call call = call_of(interface, count, dtype);
    call.reduction = static_cast<uint32_t>(reduction) + 1;
    return call;
}

void check(const Call& call) {
    if (auto reason = not_allowed(call); !reason.empty()) throw HcclError(HCCL_E_NOT_SUPPORT, reason);
}

void check_root(const Communicator& communicator, const Call& call) {
    if (call.root - 1 >= communicator.ranks) {
        throw HcclError(HCCL_E_PARA, std::string(call.name) + format(": rank %u is not one of the %u ranks of ",
                                                                     call.root - 1, communicator.ranks) +
                                         communicator.name);
    }
}

void claim(Communicator& communicator, const char* interface) {
    if (communicator.claim(Communicator::Use::collectives)) return;
    DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_distribute_dispatch_v2.md");
    throw HcclError(HCCL_E_PARA, std::string(interface) + ": the group " + communicator.name +
                                     " is used for the dispatch and combine of experts' tokens, and must have no other "
                                     "operations: use another group");
}

Operand operand(const void* address, uint64_t count, const Call& call, Access access) {
    size_t bytes = count * size_of(call.dtype);
    if (count && !address) throw HcclError(HCCL_E_PTR, std::string(call.name) + ": a buffer is null");
    if (bytes > slot_bytes) {
        OURS("a limit");
        throw HcclError(HCCL_E_MEMORY, std::string(call.name) + format(" of %zu bytes: at most %zu are supported", bytes,
                                                                       slot_bytes));
    }
    return {address, bytes, access, acl_type(call.dtype), {static_cast<int64_t>(count)}};
}

HcclResult start(const CommunicatorPointer& communicator, aclrtStream stream, Operand send, Operand receive,
                 Collective collective) {
    join_group(GroupKind::collective, collective.call.name);
    claim(*communicator, collective.call.name);
    Launch launch;
    launch.kernel = collective.call.name;
    for (auto& each : {send, receive}) {
        if (each.bytes) launch.operands.push_back(each);
    }
    if (!collective.put && send.bytes) {
        collective.bytes = send.bytes;
        collective.put = [send](char* slot) { std::memcpy(slot, backing(send.address), send.bytes); };
    }
    return launch_collective(communicator, stream, std::move(launch), std::move(collective)) ? HCCL_E_RUNTIME
                                                                                              : HCCL_SUCCESS;
}

bool in_group() { return group.depth > 0; }

void join_group(GroupKind kind, const char* interface) {
    if (!in_group()) return;
    if (group.kind != GroupKind::none && group.kind != kind) {
        DOCUMENTED("hcomm: docs/zh/api_ref/comm_mgr_c/HcclGroupStart.md");
        throw HcclError(HCCL_E_NOT_SUPPORT, std::string(interface) +
                                                " must not be in one group with calls of another kind: management of "
                                                "communicators, collectives, and messages");
    }
    group.kind = kind;
}

void at_group_end(HcclResult (*act)()) {
    if (std::find(group.ends.begin(), group.ends.end(), act) == group.ends.end()) group.ends.push_back(act);
}

}  // namespace emulator

using namespace emulator;

extern "C" {

HcclResult HcclGroupStart() {
    return guarded([] {
        if (auto reason = not_allowed("HcclGroupStart"); !reason.empty()) throw HcclError(HCCL_E_NOT_SUPPORT, reason);
        ++group.depth;
        return HCCL_SUCCESS;
    });
}

HcclResult HcclGroupEnd() {
    return guarded([] {
        DOCUMENTED("hcomm: docs/zh/api_ref/comm_mgr_c/HcclGroupEnd.md");
        if (!in_group()) throw HcclError(HCCL_E_PARA, "HcclGroupEnd without HcclGroupStart");
        if (--group.depth > 0) return HCCL_SUCCESS;
        Group ended = std::exchange(group, {});
        HcclResult result = HCCL_SUCCESS;
        for (auto* act : ended.ends) {
            HcclResult code = act();
            if (!result) result = code;
        }
        return result;
    });
}

}  // extern "C"
