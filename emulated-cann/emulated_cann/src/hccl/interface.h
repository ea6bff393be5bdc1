// What the interfaces of collectives share: arguments, refusals and the group of calls.
#pragma once

#include "hccl/collective.h"
#include "hccl/data_types.h"
#include "runtime/errors.h"

namespace emulator {

// Calls `act`, and turns an HcclError into a return value with a message.
template <class Act>
HcclResult guarded(Act act) {
    try {
        return act();
    } catch (const HcclError& error) {
        return static_cast<HcclResult>(fail(error.code, error.what()));
    }
}

// Returns the communicator of a handle, or throws.
CommunicatorPointer communicator_of(HcclComm handle, const char* interface);

Call call_of(const char* interface, uint64_t count, HcclDataType dtype);
Call call_of(const char* interface, uint64_t count, HcclDataType dtype, HcclReduceOp reduction);
// Throws if the documents do not allow the call.
void check(const Call& call);
void check_root(const Communicator& communicator, const Call& call);

// Throws if the communicator is for the dispatch and combine of experts' tokens.
void claim(Communicator& communicator, const char* interface);

// A buffer of device memory with `count` elements of the call's type. Throws if it is null.
Operand operand(const void* address, uint64_t count, const Call& call, Access access);

// Launches a collective that reads the first operand and writes the second; either may have no elements.
HcclResult start(const CommunicatorPointer& communicator, aclrtStream stream, Operand send, Operand receive,
                 Collective collective);

// Calls between HcclGroupStart and HcclGroupEnd.
enum class GroupKind { none, management, collective, point_to_point };
bool in_group();
// Throws if the group has calls of another kind.
void join_group(GroupKind kind, const char* interface);
// Has the end of the group call `act`, once for all calls with it.
void at_group_end(HcclResult (*act)());

}  // namespace emulator
