// Filters of logits for sampling.
#include <limits>

#include "op.h"

namespace {

using namespace emulator;

DOCUMENTED("ops-nn: index/apply_top_k_top_p_with_sorted/docs/aclnnApplyTopKTopP.md");
void check(In logits, In p, In k, Out) {
    if (logits.dim() != 2) throw Refused("logits must have shape [batch, vocabulary], not " + c10::str(logits.sizes()));
    if (logits.dtype() != at::kFloat && logits.dtype() != at::kHalf && logits.dtype() != at::kBFloat16)
        throw Refused(std::string("logits must be float32, float16 or bfloat16, not ") + c10::toString(logits.dtype()));
    if (!p && !k) throw Refused("p or k is required");
    if (p && (p.dtype() != logits.dtype() || p.dim() != 1 || p.size(0) != logits.size(0)))
        throw Refused("p must have shape [batch] and the logits' dtype, " +
                      c10::str(logits.dtype(), ", but is ", p.dtype(), " of shape ", p.sizes()));
    if (k && (k.dtype() != at::kInt || k.dim() != 1 || k.size(0) != logits.size(0)))
        throw Refused("k must be int32 of shape [batch], not " + c10::str(k.dtype(), " of shape ", k.sizes()));
}

// Keeps the k largest logits, and of those the fewest whose probabilities sum to p. Sets all others to -inf.
void ApplyTopKTopP(In logits, In p, In k, Out out) {
    auto [values, order] = logits.tensor().to(at::kFloat).sort(true, -1, false);
    double lowest = -std::numeric_limits<double>::infinity();
    if (k) {
        auto place = (values.size(1) - k.tensor().to(at::kLong)).clamp(0, values.size(1) - 1).unsqueeze(1);
        values = values.masked_fill(values < values.gather(1, place), lowest);
    }
    if (p) {
        auto dropped = at::softmax(values, -1).cumsum(-1) <= 1 - p.tensor().to(at::kFloat).unsqueeze(1);
        dropped.select(1, -1).fill_(false);
        values = values.masked_fill(dropped, lowest);
    }
    out.set(at::empty_like(values).scatter_(1, order, values));
}

}  // namespace

ACLNN(ApplyTopKTopP, .check = check)
