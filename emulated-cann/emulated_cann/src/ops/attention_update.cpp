// The merge of attention to parts of the keys.
#include "grouped.h"
#include "numeric.h"

namespace {

using namespace emulator;

constexpr size_t kMostParts = 16;

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_attention_update.md");
void check(Ins lse, Ins parts, int64_t type, Out out, Out merged_lse) {
    require(product_line("AttentionUpdate") != Line::inference, "it is not for " + soc_name());
    require(lse.size() == parts.size() && lse.size() >= 1 && lse.size() <= kMostParts,
            "lse and local_out must have the same number of tensors, from 1 to 16, but have " +
                std::to_string(lse.size()) + " and " + std::to_string(parts.size()));
    require(type == 0 || type == 1, "update_type must be 0 or 1, but is " + std::to_string(type));
    int64_t rows = lse[0].size(0), dim = parts[0].size(-1);
    for (size_t i = 0; i < lse.size(); ++i) {
        require_dtype(lse[i], {at::kFloat}, "lse");
        require_shape(lse[i], {rows}, "lse");
        require_dtype(parts[i], {at::kFloat, at::kHalf, at::kBFloat16}, "local_out");
        require(parts[i].dtype() == parts[0].dtype(), "the tensors of local_out must have the same dtype");
        require_shape(parts[i], {rows, dim}, "local_out");
    }
    require(dim >= 8 && dim <= 512 && dim % 8 == 0,
            "head_dim must be a multiple of 8 from 8 to 512, but is " + std::to_string(dim));
    require_shape(out, {rows, dim}, "out");
    if (type == 1) require_shape(merged_lse, {rows}, "lse_out");
}

void AttentionUpdate(Ins lse, Ins parts, int64_t type, Out out, Out merged_lse) {
    auto sums = at::stack(lse.tensors()), total = at::logsumexp(sums, 0);
    auto wide = at::stack(parts.tensors()).to(at::kFloat);  // [parts, rows, D]
    out.set((wide * at::exp(sums - total).unsqueeze(-1)).sum(0));
    if (type == 1) merged_lse.set(total);
}

}  // namespace

ACLNN(AttentionUpdate, .check = check)
