// Mixtures of experts: the choice of experts, and the projections of the experts that a batch chooses.
//
// An expert's weights are read from memory once, for all of its rows. Threads share the experts' output rows, so that
// one token uses all cores. A token's result does not depend on the batch.
#include <omp.h>

#include <numeric>

#include "products.h"
#include "replay.h"

namespace {

// The assignments of tokens to experts, sorted by expert, then by token.
struct Assignments {
    std::vector<int64_t> order;   // assignments: token * top_k + k
    std::vector<int64_t> active;  // experts with assignments, ascending
    std::vector<int64_t> start;   // of each active expert in `order`, and the end

    // Returns 0, or 1 + the index of an assignment to an expert that does not exist.
    int64_t sort(const int32_t* experts, int64_t assignments, int64_t num_experts) {
        std::vector<int64_t> next(num_experts + 1, 0);
        for (int64_t i = 0; i < assignments; i++) {
            if (experts[i] < 0 || experts[i] >= num_experts) return i + 1;
            next[experts[i] + 1]++;
        }
        for (int64_t e = 0; e < num_experts; e++) {
            if (next[e + 1]) active.push_back(e), start.push_back(next[e]);
            next[e + 1] += next[e];
        }
        start.push_back(assignments);
        order.resize(assignments);
        for (int64_t i = 0; i < assignments; i++) order[next[experts[i]]++] = i;
        return 0;
    }

    // Takes consecutive rows, as many of each expert as `counts` says. Returns whether `rows` suffice.
    bool split(const int64_t* counts, int64_t rows, int64_t num_experts) {
        int64_t total = 0;
        for (int64_t e = 0; e < num_experts; total += counts[e++]) {
            if (counts[e] < 0 || counts[e] > rows - total) return false;
            if (counts[e]) active.push_back(e), start.push_back(total);
        }
        start.push_back(total);
        order.resize(total);
        std::iota(order.begin(), order.end(), 0);
        return true;
    }

    int64_t experts() const { return int64_t(active.size()); }
    // Rows of a weight that a thread takes at a time: more pack the inputs less often, fewer share the work evenly.
    int64_t span() const { return int64_t(order.size()) >= 8 * experts() ? 4 * kBlock : kBlock; }
};

// Multiplies `count` rows of a weight with each row in `inputs`. Calls use(row, first input, inputs, rows, sums) for each
// block, with sums[m * kBlock + r]. Other matrices, `apart` elements apart, follow in sums[kOthers * kBlock * i].
template <class T, int Matrices, class Use>
void project(Multiplication<T>& multiplication, const T* weight, int64_t apart, int64_t count, int64_t width,
             const T* const* inputs, int64_t number, Use use) {
    alignas(64) float sums[Matrices][kOthers * kBlock];
    for (int64_t first = 0; first < number; first += kOthers) {
        const int64_t taken = std::min(kOthers, number - first);
        multiplication.pack_others(inputs + first, taken, width);
        for (int64_t row = 0; row < count; row += kBlock) {
            const int64_t rows = std::min(kBlock, count - row);
            for (int i = 0; i < Matrices; i++) {
                const T* from = weight + i * apart + row * width;
                multiplication.run(from, rows, sums[i], from + rows * width);
            }
            use(row, first, taken, rows, sums[0]);
        }
    }
}

// A bias [num_experts, width] of the rows' type or float32, or none.
template <class T>
struct Bias {
    const void* values;
    bool wide;
    // Adds elements from `first` on to `count` sums.
    void add(float* sums, int64_t first, int64_t count) const {
        if (!values) return;
        for (int64_t i = 0; i < count; i++)
            sums[i] += wide ? static_cast<const float*>(values)[first + i]
                            : float(static_cast<const T*>(values)[first + i]);
    }
};

// The weights of each token's experts, of the rows' type or float32.
template <class T>
struct Scores {
    const void* values;
    bool wide;
    float operator[](int64_t i) const {
        return wide ? static_cast<const float*>(values)[i] : float(static_cast<const T*>(values)[i]);
    }
};

// The product of the activated gate and up. The order of the functions is that of ACTIVATIONS in expert_kernels.py.
struct Gating {
    enum Function { kSilu, kGelu, kGeluTanh, kClippedSilu };
    int function;
    float alpha, limit;
    bool interleaved;

    template <class T>
    void operator()(const float* gate, const float* up, T* y, int64_t count) const {
        if (function == kSilu)
            for (int64_t i = 0; i < count; i++) y[i] = T(gate[i] / (1.0f + exponential(-gate[i])) * up[i]);
        else if (function == kGelu)
            for (int64_t i = 0; i < count; i++)
                y[i] = T(0.5f * gate[i] * (1.0f + std::erf(gate[i] * 0.70710678f)) * up[i]);
        else if (function == kGeluTanh)
            for (int64_t i = 0; i < count; i++) {
                const float cubic = gate[i] + 0.044715f * gate[i] * gate[i] * gate[i];
                y[i] = T(gate[i] / (1.0f + exponential(-1.5957691216f * cubic)) * up[i]);
            }
        else
            for (int64_t i = 0; i < count; i++) {
                // A comparison with NaN is false, so that NaN remains.
                const float g = gate[i] > limit ? limit : gate[i];
                const float u = up[i] > limit ? limit : up[i] < -limit ? -limit : up[i];
                y[i] = T(g / (1.0f + exponential(-alpha * g)) * (u + 1.0f));
            }
    }
};

template <class T>
void run_experts(const Assignments& sorted, const T* x, const T* gate_up, const T* down, Scores<T> weights,
                 Bias<T> gate_up_bias, Bias<T> down_bias, Gating gating, T* output, int64_t tokens, int64_t hidden,
                 int64_t width, int64_t top_k) {
    const int64_t assignments = tokens * top_k, experts = sorted.experts();
    const int64_t span = sorted.span(), blocks = (width + span - 1) / span;
    const int64_t columns = std::max<int64_t>(1, hidden / (8 * omp_get_max_threads()) / kBlock) * kBlock;
    std::vector<T> activations(assignments * width);
    std::vector<const T*> inputs(assignments), middle(assignments);
    for (int64_t i = 0; i < assignments; i++) {
        inputs[i] = x + sorted.order[i] / top_k * hidden;
        middle[i] = activations.data() + i * width;
    }
#pragma omp parallel
    {
        Multiplication<T> multiplication;
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < experts * blocks; item++) {
            const int64_t e = item / blocks, begin = item % blocks * span, start = sorted.start[e];
            const int64_t count = std::min(span, width - begin), number = sorted.start[e + 1] - start;
            const int64_t gates = sorted.active[e] * 2 * width;  // the first row of the expert's weight
            if (gating.interleaved) {
                const int64_t from = gates + 2 * begin;
                project<T, 1>(multiplication, gate_up + from * hidden, 0, 2 * count, hidden, inputs.data() + start,
                              number, [&](int64_t row, int64_t first, int64_t taken, int64_t rows, float* sums) {
                                  for (int64_t m = 0; m < taken; m++) {
                                      float *pairs = sums + m * kBlock, gate[kBlock / 2], up[kBlock / 2];
                                      gate_up_bias.add(pairs, from + row, rows);
                                      for (int64_t i = 0; i < rows / 2; i++)
                                          gate[i] = pairs[2 * i], up[i] = pairs[2 * i + 1];
                                      gating(gate, up, activations.data() + (start + first + m) * width + begin + row / 2,
                                             rows / 2);
                                  }
                              });
                continue;
            }
            const int64_t from = gates + begin;
            project<T, 2>(multiplication, gate_up + from * hidden, width * hidden, count, hidden, inputs.data() + start,
                          number, [&](int64_t row, int64_t first, int64_t taken, int64_t rows, float* sums) {
                              for (int64_t m = 0; m < taken; m++) {
                                  float *gate = sums + m * kBlock, *up = gate + kOthers * kBlock;
                                  gate_up_bias.add(gate, from + row, rows);
                                  gate_up_bias.add(up, from + width + row, rows);
                                  gating(gate, up, activations.data() + (start + first + m) * width + begin + row, rows);
                              }
                          });
        }
        // A thread takes columns of all experts, so that it adds to its own sums, always in the order of experts.
        std::vector<float> total(tokens * columns);
#pragma omp for schedule(dynamic)
        for (int64_t begin = 0; begin < hidden; begin += columns) {
            const int64_t count = std::min(columns, hidden - begin);
            std::fill(total.begin(), total.end(), 0.0f);
            for (int64_t e = 0; e < experts; e++) {
                const int64_t start = sorted.start[e];
                project<T, 1>(multiplication, down + (sorted.active[e] * hidden + begin) * width, 0, count, width,
                              middle.data() + start, sorted.start[e + 1] - start,
                              [&](int64_t row, int64_t first, int64_t taken, int64_t rows, float* sums) {
                                  for (int64_t m = 0; m < taken; m++) {
                                      const int64_t assignment = sorted.order[start + first + m];
                                      const float weight = weights[assignment];
                                      down_bias.add(sums + m * kBlock, sorted.active[e] * hidden + begin + row, rows);
                                      float* sum = total.data() + assignment / top_k * columns + row;
                                      for (int64_t i = 0; i < rows; i++) sum[i] += weight * sums[m * kBlock + i];
                                  }
                              });
            }
            for (int64_t token = 0; token < tokens; token++)
                for (int64_t i = 0; i < count; i++)
                    output[token * hidden + begin + i] = T(total[token * columns + i]);
        }
    }
}

template <class T>
void run_grouped(const Assignments& sorted, const T* x, const T* weight, Bias<T> bias, T* output, int64_t out,
                 int64_t width) {
    const int64_t span = sorted.span(), blocks = (out + span - 1) / span;
    std::vector<const T*> inputs;
    for (const int64_t row : sorted.order) inputs.push_back(x + row * width);
#pragma omp parallel
    {
        Multiplication<T> multiplication;
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < sorted.experts() * blocks; item++) {
            const int64_t e = item / blocks, begin = item % blocks * span, start = sorted.start[e];
            project<T, 1>(multiplication, weight + (sorted.active[e] * out + begin) * width, 0,
                          std::min(span, out - begin), width, inputs.data() + start, sorted.start[e + 1] - start,
                          [&](int64_t row, int64_t first, int64_t taken, int64_t rows, float* sums) {
                              for (int64_t m = 0; m < taken; m++) {
                                  bias.add(sums + m * kBlock, sorted.active[e] * out + begin + row, rows);
                                  T* y = output + (start + first + m) * out + begin + row;
                                  for (int64_t i = 0; i < rows; i++) y[i] = T(sums[m * kBlock + i]);
                              }
                          });
        }
    }
}

// Whether a score comes before another: the higher, and NaN before all others, as in torch's sort.
inline bool before(float left, float right) { return left > right || (std::isnan(left) && !std::isnan(right)); }

// Writes the indices of the `number` best scores, best first; of equal scores, the lower index first.
inline void choose(const float* scores, int64_t count, int64_t number, int32_t* best) {
    for (int64_t i = 0, filled = 0; i < count; i++) {
        if (filled == number && !before(scores[i], scores[best[number - 1]])) continue;
        int64_t at = filled < number ? filled++ : number - 1;
        for (; at > 0 && before(scores[i], scores[best[at - 1]]); at--) best[at] = best[at - 1];
        best[at] = int32_t(i);
    }
}

// Sets the scores outside the best groups of experts to -infinity. A group's score is the sum of its `best` highest.
inline void limit_groups(std::vector<float>& scores, int64_t groups, int64_t top_groups, int64_t best) {
    const int64_t size = int64_t(scores.size()) / groups;
    std::vector<float> sums(groups, 0.0f);
    std::vector<int32_t> chosen(std::max(top_groups, best));
    for (int64_t group = 0; group < groups; group++) {
        choose(scores.data() + group * size, size, best, chosen.data());
        for (int64_t i = 0; i < best; i++) sums[group] += scores[group * size + chosen[i]];
    }
    choose(sums.data(), groups, top_groups, chosen.data());
    for (int64_t group = 0; group < groups; group++)
        if (std::find(chosen.begin(), chosen.begin() + top_groups, group) == chosen.begin() + top_groups)
            std::fill_n(scores.begin() + group * size, size, -std::numeric_limits<float>::infinity());
}

}  // namespace

// Chooses experts by scores [tokens, num_experts], plus the bias if it is not null. All contiguous.
extern "C" void topk_route(const float* scores, const float* bias, void* weights, int32_t* experts, int dtype,
                           int64_t tokens, int64_t num_experts, int64_t top_k, int renormalize, float scale,
                           int64_t groups, int64_t top_groups, int64_t group_best) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for if (tokens * num_experts > 1 << 15)
        for (int64_t token = 0; token < tokens; token++) {
            const float* own = scores + token * num_experts;
            int32_t* chosen = experts + token * top_k;
            std::vector<float> choice(own, own + num_experts);
            for (int64_t e = 0; bias && e < num_experts; e++) choice[e] += bias[e];
            if (groups > 1) limit_groups(choice, groups, top_groups, group_best);
            choose(choice.data(), num_experts, top_k, chosen);
            float total = 0;
            for (int64_t k = 0; k < top_k; k++) total += own[chosen[k]];
            const float divisor = renormalize ? total + 1e-20f : 1.0f;
            for (int64_t k = 0; k < top_k; k++)
                static_cast<T*>(weights)[token * top_k + k] = T(own[chosen[k]] / divisor * scale);
        }
    });
}

// Returns 0, or 1 + the index of an assignment to an expert that does not exist. All contiguous. Biases may be null.
extern "C" int64_t expert_mlp(const void* x, const void* gate_up, const void* down, const void* weights,
                              const int32_t* experts, const void* gate_up_bias, const void* down_bias, void* output,
                              int dtype, int wide_weights, int wide_bias, int function, float alpha, float limit, int interleaved,
                              int64_t tokens, int64_t hidden, int64_t width, int64_t num_experts, int64_t top_k) {
    Assignments sorted;
    if (const int64_t wrong = sorted.sort(experts, tokens * top_k, num_experts)) return wrong;
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        run_experts(sorted, static_cast<const T*>(x), static_cast<const T*>(gate_up), static_cast<const T*>(down),
                    Scores<T>{weights, bool(wide_weights)}, Bias<T>{gate_up_bias, bool(wide_bias)},
                    Bias<T>{down_bias, bool(wide_bias)}, Gating{function, alpha, limit, bool(interleaved)},
                    static_cast<T*>(output), tokens, hidden, width, top_k);
    });
    return 0;
}

// Returns 0, or 1 if the counts exceed the rows. All contiguous. The bias may be null.
extern "C" int64_t grouped_linear(const void* x, const void* weight, const int64_t* counts, const void* bias,
                                  void* output, int dtype, int wide_bias, int64_t rows, int64_t num_experts,
                                  int64_t out, int64_t width) {
    Assignments sorted;
    if (!sorted.split(counts, rows, num_experts)) return 1;
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        run_grouped(sorted, static_cast<const T*>(x), static_cast<const T*>(weight),
                    Bias<T>{bias, bool(wide_bias)}, static_cast<T*>(output), out, width);
    });
    return 0;
}

// Copies rows of `bytes`. Returns 0, or 1 + the index of an assignment to an expert that does not exist.
extern "C" int64_t expert_permute(const char* x, const int32_t* experts, char* rows, int64_t* counts,
                                  int32_t* positions, int64_t tokens, int64_t top_k, int64_t num_experts,
                                  int64_t bytes) {
    Assignments sorted;
    if (const int64_t wrong = sorted.sort(experts, tokens * top_k, num_experts)) return wrong;
    std::fill(counts, counts + num_experts, 0);
    for (int64_t e = 0; e < sorted.experts(); e++) counts[sorted.active[e]] = sorted.start[e + 1] - sorted.start[e];
    for (int64_t row = 0; row < tokens * top_k; row++) {
        positions[sorted.order[row]] = int32_t(row);
        std::memcpy(rows + row * bytes, x + sorted.order[row] / top_k * bytes, bytes);
    }
    return 0;
}

// Returns 0, or 1 + the index of a position outside the rows. All contiguous.
extern "C" int64_t expert_unpermute(const void* rows, const int32_t* positions, const void* weights, void* output,
                                    int dtype, int wide_weights, int64_t tokens, int64_t top_k, int64_t width) {
    for (int64_t i = 0; i < tokens * top_k; i++)
        if (positions[i] < 0 || positions[i] >= tokens * top_k) return i + 1;
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        const Scores<T> scores{weights, bool(wide_weights)};
#pragma omp parallel for if (tokens * top_k * width > 1 << 15)
        for (int64_t token = 0; token < tokens; token++) {
            std::vector<float> total(width, 0.0f);
            for (int64_t k = token * top_k; k < (token + 1) * top_k; k++) {
                const T* row = static_cast<const T*>(rows) + positions[k] * width;
                const float weight = scores[k];
                for (int64_t i = 0; i < width; i++) total[i] += weight * float(row[i]);
            }
            for (int64_t i = 0; i < width; i++) static_cast<T*>(output)[token * width + i] = T(total[i]);
        }
    });
    return 0;
}

REPLAYABLE(topk_route)
REPLAYABLE(expert_mlp)
REPLAYABLE(grouped_linear)
REPLAYABLE(expert_permute)
REPLAYABLE(expert_unpermute)
