// Recurrent layers: the causal convolution, the gated delta rule, and their norms and gates.
//
// The delta rule advances token by token. Each row of a state matrix depends on itself alone, so a few rows stay in the
// CPU cache for all tokens of a sequence: memory has each row read once, and written once.
#include <algorithm>
#include <cmath>
#include <vector>

#include "elements.h"
#include "products.h"
#include "replay.h"

namespace {

constexpr int64_t kGrain = 1 << 15;  // elements; for fewer, starting threads costs more than it gains
constexpr int64_t kChannels = 256;   // of a convolution at a time
constexpr int kAtOnce = kRegisters >= 32 ? 8 : 4;  // rows of a state: their sums stay in registers

// Rows of heads: row (token, head) begins at token * outer + head * inner.
struct Heads {
    int64_t outer, inner;
    int64_t operator()(int64_t token, int64_t head) const { return token * outer + head * inner; }
};

// The sequences of a step: where their tokens begin, and the slots of their states.
struct Sequences {
    const int32_t *starts, *read, *write;
    int64_t count, saves, slots;

    int64_t length(int64_t row) const { return starts[row + 1] - starts[row]; }

    // Returns the slot of the state after a token of a sequence, or -1 if it is not kept.
    int64_t slot_after(int64_t row, int64_t token) const {
        const int64_t column = token - length(row) + saves;
        return column < 0 ? -1 : write[row * saves + column];
    }

    // Returns the number, from 1, of the first sequence with a slot that does not exist, or that descends; else 0.
    int64_t wrong(int64_t tokens) const {
        for (int64_t row = 0; row < count; row++) {
            bool fits = read[row] >= 0 && read[row] < slots && starts[row] >= 0 && length(row) >= 0;
            for (int64_t i = row * saves; i < (row + 1) * saves; i++) fits = fits && write[i] >= 0 && write[i] < slots;
            if (!fits || starts[row + 1] > tokens) return row + 1;
        }
        return 0;
    }
};

template <class T>
void widen(const T* from, float* to, int64_t count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        const Lanes values = wide(from + i);
        std::memcpy(to + i, &values, sizeof(values));
    }
    for (; i < count; i++) to[i] = float(from[i]);
}

template <class T>
void round_to(const float* from, T* to, int64_t count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) narrow(load<Lanes>(from + i), to + i);
    for (; i < count; i++) to[i] = T(from[i]);
}

float* scratch(int64_t count) {
    thread_local std::vector<float> held;
    if (int64_t(held.size()) < count) held.resize(count);
    return held.data();
}

// Convolves up to kChannels channels of one sequence. `window` is the state of these channels in the first slot.
template <class T>
void convolve(const T* x, const T* weight, const T* bias, T* window, T* y, const Sequences& of, int64_t row,
              int64_t channels, int64_t count, int64_t width, int64_t dilation, int64_t stride, bool silu) {
    const int64_t before = (width - 1) * dilation, length = of.length(row), slot = before * channels;
    T old[16 * kChannels];  // a slot that is written may be the one that was read
    for (int64_t i = 0; i < before; i++)
        std::copy_n(window + of.read[row] * slot + i * channels, count, old + i * kChannels);
    auto row_at = [&](int64_t token) {
        return token < 0 ? old + (before + token) * kChannels : x + (of.starts[row] + token) * stride;
    };
    float sums[kChannels];
    for (int64_t token = 0; token < length; token++) {
        if (bias)
            widen(bias, sums, count);
        else
            std::fill_n(sums, count, 0.0f);
        for (int64_t lag = 0; lag < width; lag++) {
            const T *from = row_at(token - before + lag * dilation), *by = weight + lag * channels;
            int64_t i = 0;
            for (; i + kLanes <= count; i += kLanes) {
                const Lanes sum = load<Lanes>(sums + i) + wide(from + i) * wide(by + i);
                std::memcpy(sums + i, &sum, sizeof(sum));
            }
            for (; i < count; i++) sums[i] += float(from[i]) * float(by[i]);
        }
        if (silu)
            for (int64_t i = 0; i < count; i++) sums[i] = sums[i] / (1.0f + exponential(-sums[i]));
        round_to(sums, y + (of.starts[row] + token) * channels, count);
        if (const int64_t kept = of.slot_after(row, token); kept >= 0)
            for (int64_t i = 0; i < before; i++)
                std::copy_n(row_at(token - before + 1 + i), count, window + kept * slot + i * channels);
    }
}

// What one value head of one sequence reads, in float32 and padded to whole vectors.
struct Inputs {
    const float *keys, *queries, *overlaps, *factors, *rates;
    int64_t length, width;  // tokens; elements of a padded key, and of a factor if channels have their own
};

// Advances kAtOnce rows of a state through the tokens: `values` and `results` have a row's element per token. The rows
// are in `rows` before, and in `out` after each token. For several tokens, both are the same memory.
template <bool kChannelwise, class Kept>
void advance(const float* rows, float* out, const Inputs& in, const float* values, float* results, Kept keep) {
    for (int64_t token = 0; token < in.length; token++) {
        const float *key = in.keys + token * in.width, *query = in.queries + token * in.width;
        Lanes sums[2 * kAtOnce] = {};
        for (int64_t i = 0; i < in.width; i += kLanes) {
            Lanes k = load<Lanes>(key + i), q = load<Lanes>(query + i);
            if constexpr (kChannelwise) {
                const Lanes f = load<Lanes>(in.factors + token * in.width + i);
                k = k * f, q = q * f;
            }
#pragma GCC unroll 8
            for (int r = 0; r < kAtOnce; r++) {
                const Lanes s = load<Lanes>(rows + r * in.width + i);
                sums[r] += s * k;
                sums[kAtOnce + r] += s * q;
            }
        }
        float dots[2 * kAtOnce], changes[kAtOnce];
        write_sums<2 * kAtOnce>(sums, dots);
        const float factor = kChannelwise ? 1.0f : in.factors[token];
        for (int r = 0; r < kAtOnce; r++) {
            changes[r] = in.rates[token] * (values[token * kAtOnce + r] - factor * dots[r]);
            results[token * kAtOnce + r] = factor * dots[kAtOnce + r] + changes[r] * in.overlaps[token];
        }
        for (int64_t i = 0; i < in.width; i += kLanes) {
            const Lanes k = load<Lanes>(key + i);
            Lanes f = Lanes{} + factor;
            if constexpr (kChannelwise) f = load<Lanes>(in.factors + token * in.width + i);
#pragma GCC unroll 8
            for (int r = 0; r < kAtOnce; r++) {
                const Lanes s = f * load<Lanes>(rows + r * in.width + i) + changes[r] * k;
                std::memcpy(out + r * in.width + i, &s, sizeof(s));
            }
        }
        keep(token);
    }
}

template <class T>
struct Tensors {
    const T *query, *key, *value, *beta;
    const float* decay;
    T* out;
    Heads queries, keys, values, betas;
};

// Advances one value head of one sequence. Tokens go in parts, so that their keys and queries stay in the CPU cache.
template <bool kChannelwise, class T, class S>
void delta_rule(const Tensors<T>& of, S* state, const Sequences& sequences, int64_t row, int64_t head, int64_t heads,
                int64_t groups, int64_t key_dim, int64_t value_dim, float scale) {
    constexpr int64_t kTokens = 32;
    const int64_t width = (key_dim + kLanes - 1) / kLanes * kLanes, start = sequences.starts[row];
    const int64_t length = sequences.length(row), matrix = value_dim * key_dim;
    const int64_t blocks = (value_dim + kAtOnce - 1) / kAtOnce, most = std::min(length, kTokens);
    // The whole matrix stays in float32 between parts; it fits the CPU's second cache.
    const int64_t faded = kChannelwise ? width : 1;
    float* held = scratch(blocks * kAtOnce * width + most * (2 * width + faded + 2 + 2 * kAtOnce));
    float *keys = held + blocks * kAtOnce * width, *queries = keys + most * width, *overlaps = queries + most * width;
    float *factors = overlaps + most, *rates = factors + most * faded, *values = rates + most, *results = values + most * kAtOnce;
    const S* from = state + (sequences.read[row] * heads + head) * matrix;
    // One token advances whole vectors of float32 from slot to slot: each is read from memory once, and written once.
    const bool direct = std::is_same_v<S, float> && length == 1 && width == key_dim && value_dim % kAtOnce == 0;
    for (int64_t first = 0; first < length; first += kTokens) {
        const int64_t count = std::min(kTokens, length - first);
        for (int64_t i = 0; i < count; i++) {
            const int64_t token = start + first + i;
            float *key = keys + i * width, *query = queries + i * width;
            widen(of.key + of.keys(token, head / groups), key, key_dim);
            widen(of.query + of.queries(token, head / groups), query, key_dim);
            float overlap = 0;
            for (int64_t j = 0; j < key_dim; j++) query[j] *= scale, overlap += query[j] * key[j];
            std::fill(key + key_dim, key + width, 0.0f);
            std::fill(query + key_dim, query + width, 0.0f);
            overlaps[i] = overlap;
            if constexpr (kChannelwise)
                for (int64_t j = 0; j < width; j++)
                    factors[i * width + j] = j < key_dim ? std::exp(of.decay[(token * heads + head) * key_dim + j]) : 0.0f;
            else
                factors[i] = std::exp(of.decay[token * heads + head]);
            rates[i] = float(of.beta[of.betas(token, head)]);
        }
        const Inputs inputs{keys, queries, overlaps, factors, rates, count, width};
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t top = block * kAtOnce, taken = std::min<int64_t>(kAtOnce, value_dim - top);
            float* rows = held + top * width;
            if (first == 0 && !direct)
                for (int64_t r = 0; r < kAtOnce; r++) {
                    const int64_t size = r < taken ? key_dim : 0;
                    widen(from + (top + r) * key_dim, rows + r * width, size);
                    std::fill(rows + r * width + size, rows + (r + 1) * width, 0.0f);
                }
            for (int64_t i = 0; i < count; i++) {
                const T* value = of.value + of.values(start + first + i, head) + top;
                for (int64_t r = 0; r < kAtOnce; r++) values[i * kAtOnce + r] = r < taken ? float(value[r]) : 0.0f;
            }
            const float* before = rows;
            if constexpr (std::is_same_v<S, float>)
                if (direct) {
                    before = from + top * key_dim;
                    // Rows are read side by side, which the processor does not see as a stream.
                    if (block + 1 < blocks)
                        for (int64_t i = 0; i < kAtOnce * key_dim; i += kLanes)
                            __builtin_prefetch(before + kAtOnce * key_dim + i);
                    rows = state + (sequences.slot_after(row, 0) * heads + head) * matrix + top * key_dim;
                }
            advance<kChannelwise>(before, rows, inputs, values, results, [&](int64_t i) {
                const int64_t slot = direct ? -1 : sequences.slot_after(row, first + i);
                if (slot < 0) return;
                S* to = state + (slot * heads + head) * matrix + top * key_dim;
                for (int64_t r = 0; r < taken; r++) round_to(rows + r * width, to + r * key_dim, key_dim);
            });
            for (int64_t i = 0; i < count; i++)
                round_to(results + i * kAtOnce, of.out + ((start + first + i) * heads + head) * value_dim + top, taken);
        }
    }
}

template <class T, class W>
void gated_norm(const T* x, const T* gate, const W* weight, T* y, int64_t width, float eps) {
    float *values = scratch(2 * width), *gates = values + width, sum = 0;
    widen(x, values, width);
    widen(gate, gates, width);
    for (int64_t i = 0; i < width; i++) sum += values[i] * values[i];
    const float scale = 1.0f / std::sqrt(sum / float(width) + eps);
    for (int64_t i = 0; i < width; i++)
        values[i] = values[i] * scale * float(weight[i]) * (gates[i] / (1.0f + exponential(-gates[i])));
    round_to(values, y, width);
}

template <class T>
void unit_norm(const T* x, T* y, int64_t width, float eps) {
    float *values = scratch(width), sum = 0;
    widen(x, values, width);
    for (int64_t i = 0; i < width; i++) sum += values[i] * values[i];
    const float scale = 1.0f / std::sqrt(sum + eps);
    for (int64_t i = 0; i < width; i++) values[i] *= scale;
    round_to(values, y, width);
}

}  // namespace

// Returns the number, from 1, of the first sequence whose slots or tokens do not exist, or 0. Rows of x have the stride `stride`; all else is
// contiguous.
extern "C" int64_t causal_conv1d(const void* x, const void* weight, const void* bias, void* window, const int32_t* read,
                                 const int32_t* write, const int32_t* starts, void* y, int dtype, int silu,
                                 int64_t tokens, int64_t sequences, int64_t saves, int64_t slots, int64_t channels,
                                 int64_t width, int64_t dilation, int64_t stride) {
    const Sequences of{starts, read, write, sequences, saves, slots};
    if (const int64_t wrong = of.wrong(tokens)) return wrong;
    const int64_t parts = (channels + kChannels - 1) / kChannels;
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for schedule(dynamic) if (tokens * channels > kGrain)
        for (int64_t task = 0; task < sequences * parts; task++) {
            const int64_t row = task / parts, first = task % parts * kChannels;
            const T* offset = bias ? static_cast<const T*>(bias) + first : nullptr;
            convolve(static_cast<const T*>(x) + first, static_cast<const T*>(weight) + first, offset,
                     static_cast<T*>(window) + first, static_cast<T*>(y) + first, of, row, channels,
                     std::min(kChannels, channels - first), width, dilation, stride, bool(silu));
        }
    });
    return 0;
}

// Returns the number, from 1, of the first sequence whose slots or tokens do not exist, or 0. Rows of heads have unit stride, `decay`, the
// state and the result are contiguous. `wide_state`: whether the state is float32. `channelwise`: whether a decay
// is for one channel of a key.
extern "C" int64_t gated_delta_rule(const void* query, const void* key, const void* value, const float* decay,
                                    const void* beta, void* state, const int32_t* read, const int32_t* write,
                                    const int32_t* starts, void* y, int dtype, int wide_state, int channelwise,
                                    int64_t tokens, int64_t sequences, int64_t saves, int64_t slots, int64_t key_heads, int64_t heads,
                                    int64_t key_dim, int64_t value_dim, int64_t query_outer, int64_t query_inner,
                                    int64_t key_outer, int64_t key_inner, int64_t value_outer, int64_t value_inner,
                                    int64_t beta_stride, float scale) {
    const Sequences of{starts, read, write, sequences, saves, slots};
    if (const int64_t wrong = of.wrong(tokens)) return wrong;
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        const Tensors<T> tensors{static_cast<const T*>(query),
                                 static_cast<const T*>(key),
                                 static_cast<const T*>(value),
                                 static_cast<const T*>(beta),
                                 decay,
                                 static_cast<T*>(y),
                                 {query_outer, query_inner},
                                 {key_outer, key_inner},
                                 {value_outer, value_inner},
                                 {beta_stride, 1}};
        auto run = [&](auto* matrices) {
            using S = std::remove_pointer_t<decltype(matrices)>;
#pragma omp parallel for schedule(dynamic) if (tokens * heads * key_dim * value_dim > kGrain)
            for (int64_t task = 0; task < sequences * heads; task++)
                (channelwise ? delta_rule<true, T, S> : delta_rule<false, T, S>)(
                    tensors, matrices, of, task / heads, task % heads, heads, heads / key_heads, key_dim, value_dim,
                    scale);
        };
        if (wide_state)
            run(static_cast<float*>(state));
        else
            run(static_cast<T*>(state));
    });
    return 0;
}

// Rows of a and b have the stride `stride_a` and `stride_b`.
extern "C" void delta_rule_gates(const void* a, const void* b, const float* factor, const float* dt_bias, float* decay,
                                 void* beta, int dtype, int64_t tokens, int64_t heads, int64_t stride_a,
                                 int64_t stride_b) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        for (int64_t token = 0; token < tokens; token++)
            for (int64_t head = 0; head < heads; head++) {
                const float x = float(static_cast<const T*>(a)[token * stride_a + head]) + dt_bias[head];
                const float y = static_cast<const T*>(b)[token * stride_b + head];
                const float soft = x > 20.0f ? x : std::log1p(std::exp(x));
                decay[token * heads + head] = factor[head] * soft;
                static_cast<T*>(beta)[token * heads + head] = T(1.0f / (1.0f + std::exp(-y)));
            }
    });
}

extern "C" void l2_norm(const void* x, void* y, int dtype, int64_t count, int64_t heads, int64_t width, int64_t outer,
                        int64_t inner, float eps) {
    const Heads rows{outer, inner};
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for if (count * width > kGrain)
        for (int64_t row = 0; row < count; row++)
            unit_norm(static_cast<const T*>(x) + rows(row / heads, row % heads), static_cast<T*>(y) + row * width,
                      width, eps);
    });
}

extern "C" void gated_rms_norm(const void* x, const void* gate, const void* weight, void* y, int dtype, int wide_weight,
                               int64_t count, int64_t heads, int64_t width, int64_t outer, int64_t inner,
                               int64_t gate_outer, int64_t gate_inner, float eps) {
    const Heads rows{outer, inner}, gates{gate_outer, gate_inner};
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        auto run = [&](const auto* weights) {
#pragma omp parallel for if (count * width > kGrain)
            for (int64_t row = 0; row < count; row++) {
                const int64_t token = row / heads, head = row % heads;
                gated_norm(static_cast<const T*>(x) + rows(token, head),
                           static_cast<const T*>(gate) + gates(token, head), weights,
                           static_cast<T*>(y) + row * width, width, eps);
            }
        };
        if (wide_weight)
            run(static_cast<const float*>(weight));
        else
            run(static_cast<const T*>(weight));
    });
}

REPLAYABLE(causal_conv1d)
REPLAYABLE(gated_delta_rule)
REPLAYABLE(delta_rule_gates)
REPLAYABLE(l2_norm)
REPLAYABLE(gated_rms_norm)
