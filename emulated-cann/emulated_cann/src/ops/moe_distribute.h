// What the dispatch of tokens to their experts' ranks and the combine of the results share: the group, and its checks.
#pragma once

#include "fused_collective.h"
#include "moe.h"

namespace emulator {

// The arguments that dispatch and combine have in common, and the sizes of this rank's tensors.
struct Distribution {
    bool is_dispatch;
    bool is_first;  // the interfaces without a version, which have other limits
    Text group;
    int64_t ranks, rank, experts;
    int64_t tp_ranks, shard_type, shared_experts, shared_ranks, global_tokens;
    int64_t tokens, hidden, choices;
    Text algorithm = nullptr;
    int64_t special_experts = 0;  // zero, copy and constant experts

    int64_t local_experts() const { return experts / ranks; }
    int64_t most_tokens() const { return (global_tokens ? global_tokens : tokens * ranks) / ranks; }  // of a rank
    int64_t most_rows() const { return most_tokens() * ranks * std::min(local_experts(), choices); }
    int64_t first_expert() const { return rank * local_experts(); }
};

// Takes the arguments that all interfaces have, in their order. The rows, x or expand_x, have the hidden size.
Distribution distribution_of(bool is_dispatch, bool is_first, const Text& group, int64_t ranks, int64_t rank,
                             int64_t experts, int64_t tp_ranks, int64_t shard_type, int64_t shared_experts,
                             int64_t shared_ranks, int64_t global_tokens, const In& rows, const In& ids);
// Refuses what the documents do not allow, and returns the communicator.
CommunicatorPointer check_distribution(const Distribution& d);
// Refuses tensors of other shapes and dtypes.
void check_tokens(const Distribution& d, const In& x, const In& ids, const In& mask, const In& weights,
                  const char* tokens_name);
void require_tensor(const In& tensor, at::ScalarType dtype, at::IntArrayRef shape, const char* name);
void require_absent(const In& tensor, const char* name);

// Makes different groups of arguments an error on all ranks.
std::vector<Agreed> agreed_numbers(const Distribution& d);

// bool [tokens, choices]: the choices that take part. Throws std::runtime_error for a mask that the documents forbid.
at::Tensor active_choices(const Distribution& d, const In& mask);
// int64 [tokens, choices]: the experts, -1 for choices that do not take part.
at::Tensor active_experts(const Distribution& d, const In& ids, const In& mask);

}  // namespace emulator
