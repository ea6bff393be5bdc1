// Collectives in which the numbers of elements differ between ranks.
#include <algorithm>
#include <cstring>

#include "hccl/hccl.h"
#include "hccl/interface.h"
#include "hccl/reduction.h"

DOCUMENTED("hccl: docs/zh/api_ref/comm_op_interface/collective_comm.md");

namespace emulator {

namespace {

using Numbers = const uint64_t*;

// Returns the elements up to the end of the last part.
uint64_t extent(Numbers counts, Numbers offsets, uint32_t ranks) {
    uint64_t end = 0;
    for (uint32_t each = 0; each < ranks; ++each) {
        if (counts[each]) end = std::max(end, counts[each] + offsets[each]);
    }
    return end;
}

void check_numbers(std::initializer_list<const void*> arrays, const Call& call) {
    for (const void* each : arrays) {
        if (!each) throw HcclError(HCCL_E_PTR, std::string(call.name) + ": an array of counts is null");
    }
}

void check_own_count(const Communicator& communicator, const Call& call, uint64_t own, uint64_t listed) {
    if (own == listed) return;
    throw HcclError(HCCL_E_PARA, std::string(call.name) +
                                     format(": rank %u gives %lu elements of its own, but lists %lu for itself",
                                            communicator.rank, static_cast<unsigned long>(own),
                                            static_cast<unsigned long>(listed)));
}

// The ranks disagree if they list different counts.
std::string different_lists(const Turn& turn) {
    for (uint32_t each = 1; each < turn.ranks(); ++each) {
        for (uint32_t of = 0; of < turn.ranks(); ++of) {
            uint64_t first = turn.counts(0).send[of], other = turn.counts(each).send[of];
            if (first == other) continue;
            return format("rank 0 lists %lu elements for rank %u, and rank %u %lu", static_cast<unsigned long>(first), of,
                          each, static_cast<unsigned long>(other));
        }
    }
    return "";
}

// The ranks disagree if one expects other counts than another sends.
std::string different_counts(const Turn& turn) {
    for (uint32_t from = 0; from < turn.ranks(); ++from) {
        for (uint32_t to = 0; to < turn.ranks(); ++to) {
            uint64_t sent = turn.counts(from).send[to], expected = turn.counts(to).receive[from];
            if (sent == expected) continue;
            return format("rank %u sends %lu elements to rank %u, which expects %lu", from,
                          static_cast<unsigned long>(sent), to, static_cast<unsigned long>(expected));
        }
    }
    return "";
}

HcclResult all_to_all(const CommunicatorPointer& communicator, aclrtStream stream, const void* send,
                      const void* receive, Counts counts, Call call) {
    Collective made{.call = call};
    uint32_t ranks = communicator->ranks;
    size_t unit = size_of(call.dtype);
    auto in = operand(send, extent(counts.send, counts.send_offset, ranks), call, Access::read);
    auto out = operand(receive, extent(counts.receive, counts.receive_offset, ranks), call, Access::write);
    made.counts = {counts};
    made.mismatch = different_counts;
    made.take = [=](const Turn& turn) {
        auto& own = turn.counts(turn.rank());
        auto* to = out.bytes ? static_cast<char*>(backing(out.address)) : nullptr;
        for (uint32_t each = 0; each < ranks; ++each) {
            if (!own.receive[each]) continue;
            std::memcpy(to + own.receive_offset[each] * unit,
                        turn.data(each) + turn.counts(each).send_offset[turn.rank()] * unit, own.receive[each] * unit);
        }
    };
    return start(communicator, stream, in, out, std::move(made));
}

void check_types(const Call& call, HcclDataType receive) {
    check(call);
    if (call.dtype == static_cast<uint32_t>(receive)) return;
    throw HcclError(HCCL_E_PARA, std::string(call.name) + " must send and receive one type, not " +
                                     dtype_name(call.dtype) + " and " + dtype_name(receive));
}

}  // namespace

}  // namespace emulator

using namespace emulator;

extern "C" {

HcclResult HcclAlltoAllV(const void* send, const void* send_counts, const void* send_offsets, HcclDataType send_type,
                         const void* receive, const void* receive_counts, const void* receive_offsets,
                         HcclDataType receive_type, HcclComm handle, aclrtStream stream) {
    return guarded([&] {
        auto communicator = communicator_of(handle, "HcclAlltoAllV");
        Call call = call_of("HcclAlltoAllV", 0, send_type);
        check_types(call, receive_type);
        check_numbers({send_counts, send_offsets, receive_counts, receive_offsets}, call);
        Counts counts{};
        uint32_t ranks = communicator->ranks;
        std::copy_n(static_cast<Numbers>(send_counts), ranks, counts.send);
        std::copy_n(static_cast<Numbers>(send_offsets), ranks, counts.send_offset);
        std::copy_n(static_cast<Numbers>(receive_counts), ranks, counts.receive);
        std::copy_n(static_cast<Numbers>(receive_offsets), ranks, counts.receive_offset);
        return all_to_all(communicator, stream, send, receive, counts, call);
    });
}

// `matrix` holds, by rows, the elements that each rank sends to each. Parts follow each other without gaps.
HcclResult HcclAlltoAllVC(const void* send, const void* matrix, HcclDataType send_type, const void* receive,
                          HcclDataType receive_type, HcclComm handle, aclrtStream stream) {
    return guarded([&] {
        auto communicator = communicator_of(handle, "HcclAlltoAllVC");
        Call call = call_of("HcclAlltoAllVC", 0, send_type);
        check_types(call, receive_type);
        check_numbers({matrix}, call);
        auto* elements = static_cast<Numbers>(matrix);
        Counts counts{};
        uint32_t ranks = communicator->ranks, self = communicator->rank;
        for (uint32_t each = 0; each < ranks; ++each) {
            counts.send[each] = elements[self * ranks + each];
            counts.receive[each] = elements[each * ranks + self];
            if (!each) continue;
            counts.send_offset[each] = counts.send_offset[each - 1] + counts.send[each - 1];
            counts.receive_offset[each] = counts.receive_offset[each - 1] + counts.receive[each - 1];
        }
        return all_to_all(communicator, stream, send, receive, counts, call);
    });
}

HcclResult HcclAllGatherV(void* send, uint64_t count, void* receive, const void* counts, const void* offsets,
                          HcclDataType dtype, HcclComm handle, aclrtStream stream) {
    return guarded([&] {
        auto communicator = communicator_of(handle, "HcclAllGatherV");
        Collective made{.call = call_of("HcclAllGatherV", 0, dtype)};
        check(made.call);
        check_numbers({counts, offsets}, made.call);
        uint32_t ranks = communicator->ranks;
        Counts lists{};
        std::copy_n(static_cast<Numbers>(counts), ranks, lists.send);
        std::copy_n(static_cast<Numbers>(offsets), ranks, lists.receive_offset);
        check_own_count(*communicator, made.call, count, lists.send[communicator->rank]);
        auto in = operand(send, count, made.call, Access::read);
        auto out = operand(receive, extent(lists.send, lists.receive_offset, ranks), made.call, Access::write);
        size_t unit = size_of(dtype);
        made.counts = {lists};
        made.mismatch = different_lists;
        made.take = [=](const Turn& turn) {
            auto& own = turn.counts(turn.rank());
            auto* to = out.bytes ? static_cast<char*>(backing(out.address)) : nullptr;
            for (uint32_t each = 0; each < ranks; ++each) {
                if (!own.send[each]) continue;
                std::memcpy(to + own.receive_offset[each] * unit, turn.data(each), own.send[each] * unit);
            }
        };
        return start(communicator, stream, in, out, std::move(made));
    });
}

HcclResult HcclReduceScatterV(void* send, const void* counts, const void* offsets, void* receive, uint64_t count,
                              HcclDataType dtype, HcclReduceOp reduction, HcclComm handle, aclrtStream stream) {
    return guarded([&] {
        auto communicator = communicator_of(handle, "HcclReduceScatterV");
        Collective made{.call = call_of("HcclReduceScatterV", 0, dtype, reduction)};
        check(made.call);
        check_numbers({counts, offsets}, made.call);
        uint32_t ranks = communicator->ranks;
        Counts lists{};
        std::copy_n(static_cast<Numbers>(counts), ranks, lists.send);
        std::copy_n(static_cast<Numbers>(offsets), ranks, lists.send_offset);
        check_own_count(*communicator, made.call, count, lists.send[communicator->rank]);
        auto in = operand(send, extent(lists.send, lists.send_offset, ranks), made.call, Access::read);
        auto out = operand(receive, count, made.call, Access::write);
        size_t unit = size_of(dtype);
        made.counts = {lists};
        made.mismatch = different_lists;
        made.take = [=](const Turn& turn) {
            if (!count) return;
            std::vector<const char*> from;
            for (uint32_t each = 0; each < ranks; ++each) {
                from.push_back(turn.data(each) + turn.counts(each).send_offset[turn.rank()] * unit);
            }
            reduce(backing(out.address), from, count, dtype, reduction);
        };
        return start(communicator, stream, in, out, std::move(made));
    });
}

}  // extern "C"
