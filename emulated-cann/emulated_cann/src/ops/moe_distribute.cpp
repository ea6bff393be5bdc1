#include "moe_distribute.h"

#include <cstdlib>

namespace emulator {

namespace {

constexpr int64_t kMebibyte = int64_t{1} << 20;

int64_t aligned(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

bool is_set(const char* variable, const char* value) {
    const char* found = std::getenv(variable);
    return found && std::string(found) == value;
}

DOCUMENTED(
    "op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_distribute_dispatch_v2.md"
    "; op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_distribute_combine_v2.md"
    "; ops-transformer: mc2/moe_distribute_dispatch_v2/docs/aclnnMoeDistributeDispatchV4.md"
    "; ops-transformer: mc2/moe_distribute_combine_v2/docs/aclnnMoeDistributeCombineV4.md");

void check_algorithm(const Distribution& d) {
    const std::string& name = d.algorithm.value;
    bool is_a2 = product() == Product::a2;
    bool by_variables =
        is_a2 && name.empty() && is_set("HCCL_INTRA_PCIE_ENABLE", "1") && is_set("HCCL_INTRA_ROCE_ENABLE", "0");
    if ((name == "hierarchy" && product() != Product::ascend950) || by_variables)
        throw NotEmulated("comm_alg hierarchy, and the variables that select it, are not emulated");
    bool is_known = name.empty() || (is_a2 && name == "fullmesh") ||
                    (!is_a2 && d.is_dispatch && (name == "fullmesh_v1" || name == "fullmesh_v2"));
    require_tiling(is_known,
                   "comm_alg must be empty, fullmesh on Atlas A2, or fullmesh_v1 or fullmesh_v2 in a dispatch on other "
                   "products, but is " +
                       name);
}

void check_ranks(const Distribution& d, const Communicator& communicator) {
    require_tiling(d.ranks == communicator.ranks, "ep_world_size must be the number of ranks of the group, " +
                                                      text(int64_t{communicator.ranks}) + ", but is " + text(d.ranks));
    require_tiling(d.rank >= 0 && d.rank < d.ranks,
                   "ep_rank_id must be at least 0 and less than " + text(d.ranks) + ", but is " + text(d.rank));
    {
        UNDEFINED("hardware would exchange the data of other ranks");
        require_tiling(d.rank == communicator.rank, "ep_rank_id must be this rank's number in the group, " +
                                                        text(int64_t{communicator.rank}) + ", but is " + text(d.rank));
    }
    if (product() != Product::a2) return require_tiling(d.ranks >= 2, "the group must have at least 2 ranks");
    require_ranks(communicator, {2, 3, 4, 5, 6, 7, 8, 16, 32, 64});
}

void check_experts(const Distribution& d) {
    require_tiling(d.tp_ranks == 0 || d.tp_ranks == 1, "tp_world_size must be 0 or 1, but is " + text(d.tp_ranks));
    require_tiling(d.shard_type == 0, "expert_shard_type must be 0, but is " + text(d.shard_type));
    require_tiling(
        d.shared_experts >= 0 && d.shared_experts <= (product() == Product::a2 ? 1 : 4),
        "shared_expert_num must be at most 1 on Atlas A2 and 4 on other products, but is " + text(d.shared_experts));
    if (d.shared_ranks && product() != Product::a2) throw NotEmulated("ranks of shared experts are not emulated");
    require_tiling(d.shared_ranks == 0, "shared_expert_rank_num must be 0 on Atlas A2, but is " + text(d.shared_ranks));
    require_tiling(d.shared_experts <= 1,
                   "shared_expert_num must be 0 or 1 with shared_expert_rank_num 0, but is " + text(d.shared_experts));
    if (d.special_experts) throw NotEmulated("zero, copy and constant experts are not emulated");
    require_tiling(d.experts > 0 && d.experts <= (d.is_first ? 512 : 1024) && d.experts % d.ranks == 0,
                   "moe_expert_num must be a multiple of the number of ranks, " + text(d.ranks) + ", and at most " +
                       text(int64_t{d.is_first ? 512 : 1024}) + ", but is " + text(d.experts));
    require_tiling(product() == Product::a2 || d.experts <= 2048, "a group has at most 2048 experts");
}

void check_sizes(const Distribution& d) {
    bool is_a2 = product() == Product::a2, is_second = d.algorithm.value == "fullmesh_v2";
    int64_t most = is_a2 || is_second ? 256 : 512;
    require_tiling(d.tokens > 0 && d.tokens <= most,
                   "there must be at least 1 token and at most " + text(most) + ", but there are " + text(d.tokens));
    require_tiling(
        is_a2 ? d.hidden > 0 && d.hidden <= 10240 && d.hidden % 32 == 0 : d.hidden >= 1024 && d.hidden <= 8192,
        "H must be a multiple of 32 and at most 10240 on Atlas A2, and from 1024 to 8192 on other products, "
        "but is " +
            text(d.hidden));
    int64_t most_choices = std::min<int64_t>(is_second ? 12 : 16, d.experts);
    require_tiling(d.choices > 0 && d.choices <= most_choices,
                   "expert_ids must have 1 to " + text(most_choices) + " columns, but has " + text(d.choices));
    require_tiling(d.global_tokens == 0 || (d.global_tokens % d.ranks == 0 && d.most_tokens() >= d.tokens),
                   "global_bs must be 0, or the number of ranks times the most tokens of a rank, which is at least " +
                       text(d.tokens * d.ranks) + ", but is " + text(d.global_tokens));
}

void check_buffer(const Distribution& d, const Communicator& communicator) {
    int64_t row = 2 * d.hidden, needed;
    if (product() == Product::a2) {
        needed = 2 * (d.most_rows() * row + 2 * kMebibyte);
    } else {
        bool is_second = d.algorithm.value == "fullmesh_v2";
        int64_t sent = aligned(row, 32) + (d.is_dispatch ? 64 : 44);
        int64_t slot = is_second ? (sent + 479) / 480 * 512 : aligned(sent, 512);
        needed = 2 * (d.local_experts() * d.most_tokens() * d.ranks * slot +
                      (d.choices + d.shared_experts) * d.most_tokens() * aligned(row, 512));
    }
    require_tiling(static_cast<int64_t>(communicator.buffer_bytes) >= needed,
                   "the buffer of the group must have at least " + text(aligned(needed, kMebibyte) / kMebibyte) +
                       " MiB, but has " + text(static_cast<int64_t>(communicator.buffer_bytes) / kMebibyte) +
                       ": set HCCL_BUFFSIZE, or hccl_buffer_size of the process group");
}

DOCUMENTED(
    "op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_distribute_dispatch.md"
    "; op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_distribute_combine.md");
void check_first(const Distribution& d, const Communicator& communicator) {
    bool is_a2 = product() == Product::a2;
    if (is_a2)
        require_ranks(communicator, {16, 32, 64});
    else
        require_ranks(communicator, {8, 16, 32, 64});
    require_tiling(is_a2 ? d.hidden <= 7168 : d.hidden == 7168,
                   "H must be at most 7168 on Atlas A2, and 7168 on Atlas A3, but is " + text(d.hidden));
    require_tiling(is_a2 || d.choices <= 8, "expert_ids must have at most 8 columns, but has " + text(d.choices));
    require_tiling(!is_a2 || d.local_experts() <= 24,
                   "a rank must have at most 24 experts, but has " + text(d.local_experts()));
}

}  // namespace

DOCUMENTED(
    "op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_distribute_dispatch_v2.md"
    "; op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_distribute_combine_v2.md");
Distribution distribution_of(bool is_dispatch, bool is_first, const Text& group, int64_t ranks, int64_t rank,
                             int64_t experts, int64_t tp_ranks, int64_t shard_type, int64_t shared_experts,
                             int64_t shared_ranks, int64_t global_tokens, const In& rows, const In& ids) {
    require_tiling(rows.dim() == 2 && ids.dim() == 2,
                   std::string(is_dispatch ? "x" : "expand_x") + " and expert_ids must have 2 dimensions");
    require_tiling(!is_dispatch || ids.size(0) == rows.size(0),
                   "expert_ids must have a row for each of the " + text(rows.size(0)) + " tokens");
    return {is_dispatch,    is_first,     group,         ranks,       rank,         experts,     tp_ranks, shard_type,
            shared_experts, shared_ranks, global_tokens, ids.size(0), rows.size(1), ids.size(1)};
}

CommunicatorPointer check_distribution(const Distribution& d) {
    if (d.is_first)
        require_product("this operation without a version", {Product::a2, Product::a3});
    else
        require_product("this operation", {Product::a2, Product::a3, Product::ascend950});
    auto communicator = find_group(d.group, Communicator::Use::experts);
    check_algorithm(d);
    check_ranks(d, *communicator);
    check_experts(d);
    check_sizes(d);
    if (d.is_first) check_first(d, *communicator);
    check_buffer(d, *communicator);
    return communicator;
}

DOCUMENTED(
    "ops-transformer: mc2/moe_distribute_dispatch_v2/docs/aclnnMoeDistributeDispatchV4.md"
    "; ops-transformer: mc2/moe_distribute_combine_v2/docs/aclnnMoeDistributeCombineV4.md");
void check_tokens(const Distribution& d, const In& x, const In& ids, const In& mask, const In& weights,
                  const char* tokens_name) {
    std::string name = tokens_name;
    if (c10::isFloat8Type(x.dtype()) || x.dtype() == at::kInt)
        throw NotEmulated(name + " of " + text(x.dtype()) + " is not emulated");
    require(is_any(x, {at::kHalf, at::kBFloat16}), name + " must be float16 or bfloat16, not " + text(x.dtype()));
    require(ids.dtype() == at::kInt, "expert_ids must be int32, not " + text(ids.dtype()));
    require_tiling(x.dim() == 2 && ids.dim() == 2, name + " and expert_ids must have 2 dimensions");
    if (weights) require_tensor(weights, at::kFloat, {d.tokens, d.choices}, "expert_scales");
    if (!mask) return;
    require(mask.dtype() == at::kBool, "x_active_mask must be bool, not " + text(mask.dtype()));
    require_tiling(has_shape(mask, {d.tokens}) || has_shape(mask, {d.tokens, d.choices}),
                   "x_active_mask must be [BS] or [BS, K], but has shape " + shown(mask.sizes()));
}

DOCUMENTED(
    "ops-transformer: mc2/moe_distribute_dispatch_v2/docs/aclnnMoeDistributeDispatchV4.md"
    "; ops-transformer: mc2/moe_distribute_combine_v2/docs/aclnnMoeDistributeCombineV4.md");
void require_tensor(const In& tensor, at::ScalarType dtype, at::IntArrayRef shape, const char* name) {
    if (tensor.dtype() != dtype)
        throw Refused(std::string(name) + " must be " + text(dtype) + ", not " + text(tensor.dtype()));
    if (tensor.sizes() != shape)
        throw TilingRefused(std::string(name) + " must have shape " + shown(shape) + ", but has " +
                            shown(tensor.sizes()));
}

void require_absent(const In& tensor, const char* name) {
    if (is_given(tensor)) throw NotEmulated(std::string(name) + " is not emulated");
}

std::vector<Agreed> agreed_numbers(const Distribution& d) {
    return {{"moe_expert_num", d.experts}, {"H", d.hidden}, {"K", d.choices}, {"global_bs", d.global_tokens}};
}

at::Tensor active_choices(const Distribution& d, const In& mask) {
    if (!mask) return at::ones({d.tokens, d.choices}, at::kBool);
    auto given = mask.tensor();
    UNDEFINED("hardware may send other tokens");
    if (given.dim() == 1) {
        int64_t active = given.sum().item<int64_t>();
        if (!given.narrow(0, 0, active).all().item<bool>())
            throw std::runtime_error("the tokens that x_active_mask selects must come before the others");
        given = given.unsqueeze(1).expand({d.tokens, d.choices});
    }
    return given;
}

at::Tensor active_experts(const Distribution& d, const In& ids, const In& mask) {
    auto active = active_choices(d, mask);
    auto experts = at::where(active, ids.tensor().to(at::kLong), -1);
    auto outside = active.logical_and(experts.lt(0).logical_or(experts.ge(d.experts)));
    DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_distribute_dispatch_v2.md");
    if (outside.any().item<bool>())
        throw std::runtime_error("expert_ids must be from 0 to " + text(d.experts - 1) + ", but has " +
                                 text(experts.masked_select(outside)[0].item<int64_t>()));
    auto sorted = std::get<0>(experts.sort(1));
    auto next = sorted.narrow(1, 1, d.choices - 1), before = sorted.narrow(1, 0, d.choices - 1);
    if (next.eq(before).logical_and(next.ge(0)).any().item<bool>())
        throw std::runtime_error("a token must not choose an expert twice, but expert_ids has such a row");
    return experts;
}

}  // namespace emulator
