// Filters of logits for sampling, and sampling.
#include <limits>

#include "numeric.h"

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

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_top_k_top_p_sample.md");
void check_sample(In logits, In k, In p, In q, In min_p, double, bool, int64_t, int64_t most, bool, bool, Out, Out, Out,
                  Out) {
    require_dtype(logits, {at::kFloat, at::kHalf, at::kBFloat16}, "logits");
    require(logits.dim() == 2 && logits.raw().numel() > 0,
            "logits must have shape [batch, vocabulary] and not be empty, but have " + shown(logits.sizes()));
    int64_t batch = logits.size(0);
    require_dtype(k, {at::kInt}, "top_k");
    require_shape(k, {batch}, "top_k");
    require_dtype(p, {logits.dtype()}, "top_p");
    require_shape(p, {batch}, "top_p");
    require_dtype(min_p, {logits.dtype()}, "min_ps");
    require_shape(min_p, {batch}, "min_ps");
    require_dtype(q, {at::kFloat}, "q");
    require_shape(q, logits.sizes(), "q");
    require(most > 0, "ks_max must be positive, but is " + std::to_string(most));
}

// A k outside [1, min(ks_max, vocabulary)] keeps all logits, as does a p of 1 or more; p of 0 or less keeps one. Of
// equal logits, the lower index comes first. top_k_guess chooses an algorithm, not a result.
void TopKTopPSampleV2(In logits, In k, In p, In q, In min_p, double epsilon, bool wants_logits, int64_t, int64_t most,
                      bool unnormalized, bool wants_candidates, Out selected, Out filtered, Out candidates,
                      Out candidate_probabilities) {
    auto given = logits.tensor().to(at::kFloat);
    auto [values, order] = given.sort(/*stable=*/true, -1, /*descending=*/true);
    int64_t vocabulary = values.size(1);
    double lowest = unnormalized ? -std::numeric_limits<double>::infinity() : 0;
    most = std::min<int64_t>((std::min<int64_t>(most, 1024) + 7) / 8 * 8, vocabulary);
    auto ranks = at::arange(vocabulary, at::kLong).unsqueeze(0);
    auto wanted = k.tensor().to(at::kLong).unsqueeze(1);
    auto kept = (ranks < wanted).logical_or_(wanted < 1).logical_or_(wanted > most);
    auto probabilities = values.masked_fill(kept.logical_not(), lowest);
    if (unnormalized) probabilities = at::softmax(probabilities, -1);
    auto share = p.tensor().to(at::kFloat).unsqueeze(1);
    auto rest = probabilities.flip(1).cumsum(1).flip(1);  // of a candidate and all that follow it
    kept = kept.logical_and_((rest > 1 - share).logical_or_(share >= 1)).logical_or_(ranks == 0);
    if (min_p) {
        auto least = probabilities.narrow(1, 0, 1) * min_p.tensor().to(at::kFloat).unsqueeze(1);
        kept = kept.logical_and_(probabilities >= least).logical_or_(ranks == 0);
    }
    auto chances = probabilities.masked_fill(kept.logical_not(), 0);
    if (wants_logits) {
        auto masked = values.masked_fill(kept.logical_not(), lowest);
        filtered.set(at::empty_like(masked).scatter_(1, order, masked));
    }
    if (wants_candidates) {
        candidates.set(order);
        candidate_probabilities.set(chances);
        return;
    }
    auto scores = q ? chances / (q.tensor() + epsilon) : chances;
    selected.set(order.gather(1, scores.argmax(1, true)).squeeze(1));
}

}  // namespace

ACLNN(ApplyTopKTopP, .check = check)
ACLNN(TopKTopPSampleV2, .check = check_sample)
