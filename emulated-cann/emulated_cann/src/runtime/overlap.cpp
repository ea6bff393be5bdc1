#include "runtime/overlap.h"

#include <algorithm>

namespace emulator {

namespace {

constexpr size_t most_parts = 1 << 16;

// Runs of contiguous bytes, repeated in dimensions in the order of decreasing strides.
struct Layout {
    struct Dimension {
        int64_t size, stride;  // in bytes
        int64_t reach;         // bytes from the first byte to the last of everything inside
    };
    int64_t begin, run;
    std::vector<Dimension> dimensions;
    size_t parts = 1;

    explicit Layout(const Operand& operand)
        : begin(reinterpret_cast<intptr_t>(operand.address)), run(static_cast<int64_t>(operand.bytes)) {
        if (operand.strides.empty()) return;
        int64_t last = 1;
        for (size_t d = 0; d < operand.shape.size(); ++d) last += (operand.shape[d] - 1) * operand.strides[d];
        run /= last;  // the size of an element
        for (size_t d = 0; d < operand.shape.size(); ++d) {
            if (operand.shape[d] > 1 && operand.strides[d])
                dimensions.push_back({operand.shape[d], operand.strides[d] * run, 0});
        }
        std::sort(dimensions.begin(), dimensions.end(), [](auto& a, auto& b) { return a.stride < b.stride; });
        size_t inner = 0;
        while (inner < dimensions.size() && dimensions[inner].stride == run) run *= dimensions[inner++].size;
        dimensions.erase(dimensions.begin(), dimensions.begin() + inner);
        int64_t reach = run;
        for (auto& each : dimensions) {
            each.reach = reach;
            reach += (each.size - 1) * each.stride;
            parts *= each.size;
        }
        std::reverse(dimensions.begin(), dimensions.end());
    }

    bool touches(int64_t first, int64_t end, int64_t base, size_t depth = 0) const {
        if (depth == dimensions.size()) return base < end && first < base + run;
        auto& [size, stride, reach] = dimensions[depth];
        int64_t low = first - reach < base ? 0 : (first - reach - base) / stride + 1;
        int64_t high = end <= base ? -1 : std::min(size - 1, (end - 1 - base) / stride);
        for (int64_t i = low; i <= high; ++i) {
            if (touches(first, end, base + i * stride, depth + 1)) return true;
        }
        return false;
    }

    bool any_touches(const Layout& other, int64_t base, size_t depth = 0) const {
        if (depth == dimensions.size()) return other.touches(base, base + run, other.begin);
        for (int64_t i = 0; i < dimensions[depth].size; ++i) {
            if (any_touches(other, base + i * dimensions[depth].stride, depth + 1)) return true;
        }
        return false;
    }
};

}  // namespace

bool do_overlap(const Operand& one, const Operand& other) {
    Layout first(one), second(other);
    auto& fewer = first.parts <= second.parts ? first : second;
    auto& more = first.parts <= second.parts ? second : first;
    return fewer.parts > most_parts || fewer.any_touches(more, fewer.begin);
}

}  // namespace emulator
