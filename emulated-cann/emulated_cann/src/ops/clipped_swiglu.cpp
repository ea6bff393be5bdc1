// SwiGLU between limits, with a factor and a shift of its own.
#include "grouped.h"
#include "numeric.h"

namespace {

using namespace emulator;

constexpr int64_t kMostRowGroups = 8192;

DOCUMENTED("ops-nn: activation/clipped_swiglu/docs/aclnnClippedSwiglu.md");

void check(In x, In groups, int64_t dim, double, double limit, double, bool, Out y) {
    require(product_line("ClippedSwiglu") != Line::inference, "ClippedSwiglu is not for " + soc_name());
    require_dtype(x, {at::kFloat, at::kHalf, at::kBFloat16}, "x");
    require(x.dim() > 0 && x.raw().numel() > 0, "x must have a dimension, and elements");
    auto shape = x.sizes().vec();
    auto& halved = shape[wrap(dim, x.dim())];
    require(halved % 2 == 0, "the dimension to split must be even, but is " + std::to_string(halved));
    halved /= 2;
    require(y.dtype() == x.dtype(), "y must have x's dtype");
    require_shape(y, shape, "y");
    require(limit > 0, "limit must be above 0");
    if (!groups) return;
    require_dtype(groups, {at::kLong}, "group_index");
    require(groups.dim() == 1 && groups.size(0) > 0 && groups.size(0) <= kMostRowGroups,
            "group_index must have 1 dimension, of 1 to 8192 elements");
}

// The rows of all groups together: no more than there are.
int64_t rows_of(const In& groups, int64_t most) {
    auto counts = groups.tensor();
    if ((counts < 0).any().item<bool>()) throw std::runtime_error("group_index has a negative element");
    return std::min(counts.sum().item<int64_t>(), most);
}

// With groups, rows beyond the last keep what the memory held. Halves or pairs are those of the dimension split and all
// after it, taken together.
void ClippedSwiglu(In x, In groups, int64_t dim, double alpha, double limit, double bias, bool interleaved, Out y) {
    dim = wrap(dim, x.dim());
    int64_t before = 1;
    for (int64_t d = 0; d < dim; ++d) before *= x.size(d);
    int64_t rows = groups ? rows_of(groups, before) : before;
    if (rows == 0) return;
    auto values = x.tensor().reshape({before, -1}).narrow(0, 0, rows).to(at::kFloat);
    int64_t half = values.size(1) / 2;
    auto gate = interleaved ? values.slice(1, 0, {}, 2) : values.narrow(1, 0, half);
    auto linear = interleaved ? values.slice(1, 1, {}, 2) : values.narrow(1, half, half);
    gate = at::clamp_max(gate, limit);
    auto result = gate * at::sigmoid(gate * alpha) * (at::clamp(linear, -limit, limit) + bias);
    y.raw().view({before, half}).narrow(0, 0, rows).copy_(result);
}

}  // namespace

ACLNN(ClippedSwiglu, .check = check)
