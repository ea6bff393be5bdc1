// Collectives in which every rank gives the same number of elements.
#include <algorithm>
#include <cstring>

#include "hccl/hccl.h"
#include "hccl/interface.h"
#include "hccl/reduction.h"

DOCUMENTED("hccl: docs/zh/api_ref/comm_op_interface/collective_comm.md");

namespace emulator {

namespace {

// Above this size, each rank reduces its part of the elements, and all gather the results.
constexpr size_t shared_work_bytes = size_t{64} << 10;

std::vector<const char*> data_of_ranks(const Turn& turn, size_t offset) {
    std::vector<const char*> result;
    for (uint32_t each = 0; each < turn.ranks(); ++each) result.push_back(turn.data(each) + offset);
    return result;
}

HcclReduceOp reduction_of(const Call& call) { return static_cast<HcclReduceOp>(call.reduction - 1); }

struct Part {
    size_t begin, count;  // in elements
};
Part part_of(uint64_t count, uint32_t rank, uint32_t ranks) {
    size_t begin = count * rank / ranks;
    return {begin, count * (rank + 1) / ranks - begin};
}

void all_reduce(Collective& made, const Operand& receive) {
    Call call = made.call;
    size_t unit = size_of(call.dtype);
    if (receive.bytes <= shared_work_bytes) {
        made.take = [=](const Turn& turn) {
            reduce(backing(receive.address), data_of_ranks(turn, 0), call.count, call.dtype, reduction_of(call));
        };
        return;
    }
    // Only this rank reads its part of the others' data, and others read its part of its own data only afterwards.
    made.combine = [=](const Turn& turn) {
        auto part = part_of(call.count, turn.rank(), turn.ranks());
        size_t offset = part.begin * unit;
        reduce(turn.data(turn.rank()) + offset, data_of_ranks(turn, offset), part.count, call.dtype, reduction_of(call));
    };
    made.take = [=](const Turn& turn) {
        auto* out = static_cast<char*>(backing(receive.address));
        for (uint32_t each = 0; each < turn.ranks(); ++each) {
            auto part = part_of(call.count, each, turn.ranks());
            std::memcpy(out + part.begin * unit, turn.data(each) + part.begin * unit, part.count * unit);
        }
    };
}

}  // namespace

}  // namespace emulator

using namespace emulator;

extern "C" {

HcclResult HcclAllReduce(void* send, void* receive, uint64_t count, HcclDataType dtype, HcclReduceOp reduction,
                         HcclComm handle, aclrtStream stream) {
    return guarded([&] {
        auto communicator = communicator_of(handle, "HcclAllReduce");
        Collective made{.call = call_of("HcclAllReduce", count, dtype, reduction)};
        check(made.call);
        if (!count) return HCCL_SUCCESS;  // as the released HCCL: ranks do not wait for each other
        auto out = operand(receive, count, made.call, Access::write);
        all_reduce(made, out);
        return start(communicator, stream, operand(send, count, made.call, Access::read), out, std::move(made));
    });
}

HcclResult HcclReduce(void* send, void* receive, uint64_t count, HcclDataType dtype, HcclReduceOp reduction,
                      uint32_t root, HcclComm handle, aclrtStream stream) {
    return guarded([&] {
        auto communicator = communicator_of(handle, "HcclReduce");
        Collective made{.call = call_of("HcclReduce", count, dtype, reduction)};
        Call& call = made.call;
        call.root = root + 1;
        check(call);
        check_root(*communicator, call);
        if (!count) return HCCL_SUCCESS;
        bool is_root = communicator->rank == root;
        auto out = operand(receive, is_root ? count : 0, call, Access::write);
        made.take = [=, call = call](const Turn& turn) {
            if (!is_root) return;
            reduce(backing(out.address), data_of_ranks(turn, 0), call.count, call.dtype, reduction_of(call));
        };
        return start(communicator, stream, operand(send, count, call, Access::read), out, std::move(made));
    });
}

HcclResult HcclReduceScatter(void* send, void* receive, uint64_t count, HcclDataType dtype, HcclReduceOp reduction,
                             HcclComm handle, aclrtStream stream) {
    return guarded([&] {
        auto communicator = communicator_of(handle, "HcclReduceScatter");
        Collective made{.call = call_of("HcclReduceScatter", count, dtype, reduction)};
        check(made.call);
        if (!count) return HCCL_SUCCESS;
        auto out = operand(receive, count, made.call, Access::write);
        made.take = [=, call = made.call](const Turn& turn) {
            auto parts = data_of_ranks(turn, out.bytes * turn.rank());
            reduce(backing(out.address), parts, call.count, call.dtype, reduction_of(call));
        };
        auto in = operand(send, count * communicator->ranks, made.call, Access::read);
        return start(communicator, stream, in, out, std::move(made));
    });
}

HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType dtype, uint32_t root, HcclComm handle,
                         aclrtStream stream) {
    return guarded([&] {
        auto communicator = communicator_of(handle, "HcclBroadcast");
        Collective made{.call = call_of("HcclBroadcast", count, dtype)};
        made.call.root = root + 1;
        check(made.call);
        check_root(*communicator, made.call);
        if (!count) return HCCL_SUCCESS;
        bool is_root = communicator->rank == root;
        auto in = operand(buffer, is_root ? count : 0, made.call, Access::read);
        auto out = operand(buffer, is_root ? 0 : count, made.call, Access::write);
        made.take = [=](const Turn& turn) {
            if (out.bytes) std::memcpy(backing(out.address), turn.data(root), out.bytes);
        };
        return start(communicator, stream, in, out, std::move(made));
    });
}

HcclResult HcclScatter(void* send, void* receive, uint64_t count, HcclDataType dtype, uint32_t root, HcclComm handle,
                       aclrtStream stream) {
    return guarded([&] {
        auto communicator = communicator_of(handle, "HcclScatter");
        Collective made{.call = call_of("HcclScatter", count, dtype)};
        made.call.root = root + 1;
        check(made.call);
        check_root(*communicator, made.call);
        if (!count) return HCCL_SUCCESS;
        bool is_root = communicator->rank == root;
        auto in = operand(send, is_root ? count * communicator->ranks : 0, made.call, Access::read);
        auto out = operand(receive, count, made.call, Access::write);
        made.take = [=](const Turn& turn) {
            std::memcpy(backing(out.address), turn.data(root) + out.bytes * turn.rank(), out.bytes);
        };
        return start(communicator, stream, in, out, std::move(made));
    });
}

HcclResult HcclAllGather(void* send, void* receive, uint64_t count, HcclDataType dtype, HcclComm handle,
                         aclrtStream stream) {
    return guarded([&] {
        auto communicator = communicator_of(handle, "HcclAllGather");
        Collective made{.call = call_of("HcclAllGather", count, dtype)};
        check(made.call);
        if (!count) return HCCL_SUCCESS;
        auto in = operand(send, count, made.call, Access::read);
        auto out = operand(receive, count * communicator->ranks, made.call, Access::write);
        made.take = [=](const Turn& turn) {
            auto* to = static_cast<char*>(backing(out.address));
            for (uint32_t each = 0; each < turn.ranks(); ++each) {
                std::memcpy(to + each * in.bytes, turn.data(each), in.bytes);
            }
        };
        return start(communicator, stream, in, out, std::move(made));
    });
}

HcclResult HcclAlltoAll(const void* send, uint64_t send_count, HcclDataType send_type, const void* receive,
                        uint64_t receive_count, HcclDataType receive_type, HcclComm handle, aclrtStream stream) {
    return guarded([&] {
        auto communicator = communicator_of(handle, "HcclAlltoAll");
        Collective made{.call = call_of("HcclAlltoAll", send_count, send_type)};
        check(made.call);
        if (send_count != receive_count || send_type != receive_type) {
            DOCUMENTED("hccl: docs/zh/api_ref/comm_op_interface/HcclAlltoAll.md");
            throw HcclError(HCCL_E_PARA, "HcclAlltoAll must send and receive the same number of elements of one type");
        }
        if (!send_count) return HCCL_SUCCESS;
        auto in = operand(send, send_count * communicator->ranks, made.call, Access::read);
        auto out = operand(receive, in.shape[0], made.call, Access::write);
        size_t bytes = in.bytes / communicator->ranks;
        made.take = [=](const Turn& turn) {
            auto* to = static_cast<char*>(backing(out.address));
            for (uint32_t each = 0; each < turn.ranks(); ++each) {
                std::memcpy(to + each * bytes, turn.data(each) + turn.rank() * bytes, bytes);
            }
        };
        return start(communicator, stream, in, out, std::move(made));
    });
}

HcclResult HcclBarrier(HcclComm handle, aclrtStream stream) {
    return guarded([&] {
        auto communicator = communicator_of(handle, "HcclBarrier");
        if (auto reason = not_allowed("HcclBarrier"); !reason.empty()) throw HcclError(HCCL_E_NOT_SUPPORT, reason);
        Collective made{.call = call_of("HcclBarrier", 0, HCCL_DATA_TYPE_INT8)};
        made.take = [](const Turn&) {};
        return start(communicator, stream, {}, {}, std::move(made));
    });
}

}  // extern "C"
