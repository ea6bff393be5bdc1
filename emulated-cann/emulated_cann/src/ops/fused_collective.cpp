#include "fused_collective.h"

#include <algorithm>
#include <cstring>

#include "acl/acl.h"
#include "hccl/reduction.h"

namespace emulator {

namespace {

uint32_t hccl_type(at::ScalarType dtype) {
    switch (dtype) {
        case at::kHalf:
            return HCCL_DATA_TYPE_FP16;
        case at::kBFloat16:
            return HCCL_DATA_TYPE_BFP16;
        case at::kChar:
            return HCCL_DATA_TYPE_INT8;
        default:
            return HCCL_DATA_TYPE_FP32;
    }
}

template <class... Arguments>
void guard(std::function<void(Arguments...)>& function) {
    if (!function) return;
    function = [body = std::move(function)](Arguments... arguments) { run_body([&] { body(arguments...); }); };
}

// Returns "1, 2 or 4".
std::string listed(std::initializer_list<uint32_t> numbers) {
    std::string text;
    for (auto each = numbers.begin(); each != numbers.end(); ++each) {
        if (each != numbers.begin()) text += each + 1 == numbers.end() ? " or " : ", ";
        text += std::to_string(*each);
    }
    return text;
}

}  // namespace

std::function<int(aclrtStream, Launch)> submission(const char* kernel, Fused fused) {
    if (!fused.communicator) return [](aclrtStream, Launch) { return 0; };
    Collective& collective = fused.collective;
    std::strncpy(collective.call.name, kernel, sizeof(collective.call.name) - 1);
    guard(collective.put);
    guard(collective.combine);
    guard(collective.take);
    return [fused = std::move(fused)](aclrtStream stream, Launch launch) {
        return launch_collective(fused.communicator, stream, std::move(launch), fused.collective);
    };
}

DOCUMENTED("ops-transformer: mc2 (the table of products of each operation)");
void require_product(const char* name, std::initializer_list<Product> allowed) {
    if (std::find(allowed.begin(), allowed.end(), product()) == allowed.end())
        throw TilingRefused(std::string(name) + " is not for " + soc_name());
}

DOCUMENTED("ops-transformer: mc2 (the parameter group of each operation)");
CommunicatorPointer find_group(const Text& group, Communicator::Use use) {
    require_tiling(
        !group.value.empty() && group.value.size() < COMM_NAME_MAX_LENGTH,
        "the name of the group must have 1 to 127 characters, but has " + std::to_string(group.value.size()));
    int32_t device = 0;
    if (aclrtGetDevice(&device)) device = 0;
    auto found = find_communicator(group.value, device);
    require_tiling(found != nullptr, "HCCL has no communicator " + group.value + " on the current device, " +
                                         std::to_string(device) +
                                         ": pass the result of get_hccl_comm_name of a process group of this device");
    DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_distribute_dispatch_v2.md");
    require_tiling(found->claim(use), "the group " + group.value +
                                          " is used for other operations: dispatch and combine need a group of their "
                                          "own, from torch.distributed.new_group");
    return found;
}

DOCUMENTED("ops-transformer: mc2 (the constraints of each operation)");
void require_ranks(const Communicator& communicator, std::initializer_list<uint32_t> allowed) {
    if (std::find(allowed.begin(), allowed.end(), communicator.ranks) == allowed.end())
        throw TilingRefused("the group must have " + listed(allowed) + " ranks on " + soc_name() + ", but has " +
                            std::to_string(communicator.ranks));
}

Collective collective_of(at::ScalarType dtype, uint64_t count, bool is_sum) {
    Collective made;
    made.call.dtype = hccl_type(dtype);
    made.call.count = count;
    made.call.reduction = is_sum ? HCCL_REDUCE_SUM + 1 : 0;
    return made;
}

void set_bytes(Collective& collective, size_t bytes) {
    if (bytes > slot_bytes)
        throw NotEmulated("a fused collective of " + std::to_string(bytes) + " bytes is not emulated: at most " +
                          std::to_string(slot_bytes) + " are");
    collective.bytes = bytes;
}

void require_agreement(Collective& collective, const std::vector<Agreed>& numbers) {
    Counts counts{};
    for (size_t each = 0; each < numbers.size(); ++each) counts.send[each] = static_cast<uint64_t>(numbers[each].value);
    collective.counts = {counts};
    collective.mismatch = [numbers](const Turn& turn) { return find_disagreement(turn, numbers); };
}

std::string find_disagreement(const Turn& turn, const std::vector<Agreed>& numbers) {
    for (uint32_t each = 1; each < turn.ranks(); ++each) {
        for (size_t which = 0; which < numbers.size(); ++which) {
            auto first = static_cast<int64_t>(turn.counts(0).send[which]);
            auto other = static_cast<int64_t>(turn.counts(each).send[which]);
            if (first == other) continue;
            return std::string(numbers[which].name) + " must be the same on all ranks, but is " +
                   std::to_string(first) + " on rank 0 and " + std::to_string(other) + " on rank " +
                   std::to_string(each);
        }
    }
    return "";
}

at::Tensor in_slot(char* data, at::IntArrayRef shape, at::ScalarType dtype) {
    return at::from_blob(data, shape, at::TensorOptions().dtype(dtype));
}

at::Tensor sum_of_ranks(const Turn& turn, int64_t first, at::IntArrayRef shape, at::ScalarType dtype) {
    std::vector<const char*> parts;
    size_t offset = first * c10::elementSize(dtype);
    for (uint32_t each = 0; each < turn.ranks(); ++each) parts.push_back(turn.data(each) + offset);
    auto sum = at::empty(shape, dtype);
    reduce(sum.data_ptr(), parts, sum.numel(), hccl_type(dtype), HCCL_REDUCE_SUM);
    return sum;
}

}  // namespace emulator
