// Pooling of groups of consecutive tokens, whose incomplete group a state per sequence holds between steps.
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "elements.h"
#include "replay.h"

namespace {

constexpr int64_t kGrain = 1 << 15;  // elements; for fewer, starting threads costs more than it gains
constexpr int64_t kChannels = 64;    // that are pooled at a time

// Where a token of a group has its values, the logits of their weights, and what is added to these.
template <class T, class B>
struct Row {
    const T *values, *gate;
    const B* bias;
};

// Writes the sums of `dim` channels, weighted by the softmax over the rows, or their mean without a gate.
template <class T, class B>
void pool(const std::vector<Row<T, B>>& rows, int64_t dim, T* to) {
    for (int64_t first = 0; first < dim; first += kChannels) {
        const int64_t count = std::min(kChannels, dim - first);
        float most[kChannels], total[kChannels], sums[kChannels], logits[kChannels];
        std::fill_n(most, count, -std::numeric_limits<float>::infinity());
        std::fill_n(total, count, 0.0f), std::fill_n(sums, count, 0.0f);
        auto read = [&](const Row<T, B>& row) {
            for (int64_t i = 0; i < count; i++) logits[i] = row.gate ? float(row.gate[first + i]) : 0.0f;
            if (row.bias)
                for (int64_t i = 0; i < count; i++) logits[i] += float(row.bias[first + i]);
        };
        for (const auto& row : rows) {
            read(row);
            for (int64_t i = 0; i < count; i++) most[i] = std::max(most[i], logits[i]);
        }
        for (const auto& row : rows) {
            read(row);
            for (int64_t i = 0; i < count; i++) {
                const float weight = exponential(logits[i] - most[i]);
                total[i] += weight, sums[i] += weight * float(row.values[first + i]);
            }
        }
        for (int64_t i = 0; i < count; i++) to[first + i] = T(sums[i] / total[i]);
    }
}

}  // namespace

// Returns the number, from 1, of the first sequence whose slots or tokens do not exist, or 0. Rows of `x`, `gate` and
// `bias` have unit stride; the others are contiguous. `written` has `saves` slots of each sequence.
extern "C" int64_t pool_groups(const void* x, const void* gate, const void* bias, void* tail, const int32_t* slots,
                               const int32_t* written, const int32_t* starts, const int32_t* lengths, void* y,
                               int dtype, int wide_bias, int64_t tokens, int64_t sequences, int64_t saves,
                               int64_t num_slots, int64_t dim, int64_t group, int64_t span, int64_t stride,
                               int64_t gate_stride) {
    auto exists = [&](int32_t slot) { return slot >= 0 && slot < num_slots; };
    for (int64_t row = 0; row < sequences; row++)
        if (!exists(slots[row]) || !std::all_of(written + row * saves, written + (row + 1) * saves, exists) ||
            starts[row] < 0 || starts[row] > starts[row + 1] || starts[row + 1] > tokens)
            return row + 1;
    const int64_t width = span * group, features = span * dim, stored = gate ? 2 * features : features;
    std::vector<int32_t> owner(tokens, -1);
    for (int64_t row = 0; row < sequences; row++)
        if (lengths[row] > 0) std::fill(owner.begin() + starts[row], owner.begin() + starts[row + 1], int32_t(row));
    auto position = [&](int64_t token) { return int64_t(lengths[owner[token]]) - starts[owner[token] + 1] + token; };
    auto run = [&](auto type, auto of_bias) {
        using T = decltype(type);
        using B = decltype(of_bias);
        const T *values = static_cast<const T*>(x), *gates = static_cast<const T*>(gate);
        T* kept = static_cast<T*>(tail);
#pragma omp parallel if (tokens * features > kGrain)
        {
            std::vector<Row<T, B>> rows;
#pragma omp for schedule(dynamic)
            for (int64_t token = 0; token < tokens; token++) {
                T* to = static_cast<T*>(y) + token * dim;
                if (owner[token] < 0 || (position(token) + 1) % group) {
                    std::fill_n(to, dim, T(0.0f));
                    continue;
                }
                rows.clear();
                for (int64_t i = 0; i < width; i++) {
                    const int64_t from = token - width + 1 + i, place = position(token) - width + 1 + i;
                    const int64_t part = i / group * dim;
                    if (place < 0) continue;
                    const bool is_new = from >= starts[owner[token]];
                    const T* old = kept + (slots[owner[token]] * width + place % width) * stored + part;
                    rows.push_back({is_new ? values + from * stride + part : old,
                                    !gate    ? nullptr
                                    : is_new ? gates + from * gate_stride + part
                                             : old + features,
                                    bias ? static_cast<const B*>(bias) + i % group * features + part : nullptr});
                }
                pool(rows, dim, to);
            }
#pragma omp for
            for (int64_t row = 0; row < sequences; row++) {
                if (lengths[row] <= 0) continue;
                const T* from = kept + slots[row] * width * stored;
                for (int64_t save = 0; save < saves; save++) {
                    const int64_t end = starts[row + 1] - saves + save + 1;
                    if (end <= starts[row]) continue;  // the sequence has fewer tokens
                    T* slot = kept + written[row * saves + save] * width * stored;
                    // A slot that is read may be written before the last: later tokens replace what that changes.
                    if (slot != from) std::copy_n(from, width * stored, slot);
                    for (int64_t token = std::max<int64_t>(starts[row], end - width); token < end; token++) {
                        T* to = slot + position(token) % width * stored;
                        std::copy_n(values + token * stride, features, to);
                        if (gate) std::copy_n(gates + token * gate_stride, features, to + features);
                    }
                }
            }
        }
    };
    with_type(dtype, [&](auto type) {
        if (wide_bias)
            run(type, float{});
        else
            run(type, type);
    });
    return 0;
}

REPLAYABLE(pool_groups)
