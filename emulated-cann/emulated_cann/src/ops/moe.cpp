#include "moe.h"

namespace emulator {

Chip chip() {
    const auto& name = soc_name();
    if (name.starts_with("Ascend910B") || name.starts_with("Ascend910_93")) return Chip::a2_a3;
    if (name.starts_with("Ascend310P")) return Chip::ascend310p;
    if (name.starts_with("Ascend950")) return Chip::ascend950;
    return Chip::other;
}

SortedChoices sort_choices(const at::Tensor& expert_idx, int64_t first, int64_t end) {
    auto experts = expert_idx.reshape(-1).to(at::kLong);
    auto inside = experts.ge(first).logical_and_(experts.lt(end));
    auto keys = at::where(experts.lt(first), std::numeric_limits<int64_t>::max(), experts);
    auto [sorted, places] = at::sort(keys, /*stable=*/true, /*dim=*/0, /*descending=*/false);
    int64_t active = inside.sum().item<int64_t>();
    return {places, sorted.narrow(0, 0, active) - first, active};
}

at::Tensor count_choices(const SortedChoices& sorted, int64_t range) {
    return at::bincount(sorted.experts, {}, range).to(at::kLong);
}

at::Tensor place_in_slots(const SortedChoices& sorted, const at::Tensor& counts, int64_t capacity) {
    auto starts = counts.cumsum(0) - counts;
    auto position = at::arange(sorted.active, at::kLong) - starts.index_select(0, sorted.experts);
    return at::where(position < capacity, sorted.experts * capacity + position, -1);
}

at::Tensor gather_index(const SortedChoices& sorted, const at::Tensor& destinations) {
    auto index = at::full(sorted.places.sizes(), -1, at::kLong);
    index.index_put_({sorted.places.narrow(0, 0, destinations.size(0))}, destinations);
    return index;
}

void write_first(const Out& output, const at::Tensor& rows) { output.raw().narrow(0, 0, rows.size(0)).copy_(rows); }

at::Tensor quantize_by(const at::Tensor& values, const at::Tensor& scale, const at::Tensor& offset) {
    return at::round(values.to(at::kFloat) * scale + offset).clamp_(-128, 127).to(at::kChar);
}

QuantizedRows quantize_each(const at::Tensor& rows) {
    if (rows.numel() == 0) return {rows.to(at::kChar), at::zeros({rows.size(0)})};
    auto scales = rows.abs().amax(-1, true) / 127;
    auto values = at::where(scales == 0, 0, rows / scales);
    return {at::round(values).clamp_(-128, 127).to(at::kChar), scales.squeeze(-1)};
}

}  // namespace emulator
