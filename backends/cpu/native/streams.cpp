// Hyper-connections: the weights by which a layer's parts read, write and mix the residual streams of a token.
//
// Sums take the same elements in the same order whatever else a step computes, so a token's result does not depend on
// other tokens or on the number of threads.
#include <algorithm>
#include <cmath>
#include <vector>

#include "elements.h"
#include "replay.h"
#include "vector.h"

namespace {

constexpr int64_t kGrain = 1 << 15;  // products; for fewer, starting threads costs more than it gains
constexpr int64_t kHeld = 64;        // tokens whose streams are held in float32 at a time
constexpr int64_t kTokens = 4;       // of which a row of the projection is read for

float sum_of(Lanes lanes) {
    float sum = 0;
    for (int lane = 0; lane < kLanes; lane++) sum += lanes[lane];
    return sum;
}

// Writes `width` elements in float32. Returns the sum of their squares.
template <class T>
float widen(const T* from, int64_t width, float* to) {
    Lanes squares = {};
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
        const Lanes values = wide(from + i);
        std::memcpy(to + i, &values, sizeof(values));
        squares += values * values;
    }
    float sum = sum_of(squares);
    for (; i < width; i++) to[i] = float(from[i]), sum += to[i] * to[i];
    return sum;
}

// Writes the products of a row with the rows of up to kTokens tokens, `apart` apart.
void multiply(const float* row, const float* tokens, int64_t count, int64_t width, float* to, int64_t apart) {
    Lanes sums[kTokens][2] = {};
    int64_t i = 0;
    for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
        const Lanes first = load<Lanes>(row + i), second = load<Lanes>(row + i + kLanes);
        for (int64_t token = 0; token < kTokens; token++) {
            const float* x = tokens + std::min(token, count - 1) * width + i;
            sums[token][0] += first * load<Lanes>(x), sums[token][1] += second * load<Lanes>(x + kLanes);
        }
    }
    for (int64_t token = 0; token < count; token++) {
        float sum = sum_of(sums[token][0] + sums[token][1]);
        for (int64_t rest = i; rest < width; rest++) sum += row[rest] * tokens[token * width + rest];
        to[token * apart] = sum;
    }
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// Makes the softmax of each row, then normalises columns and rows in turn, by the algorithm of Sinkhorn and Knopp.
void normalise(float* mix, int64_t count, int64_t iterations, float eps) {
    auto divide = [&](int64_t along, int64_t across) {
        for (int64_t line = 0; line < count; line++) {
            float sum = 0;
            for (int64_t i = 0; i < count; i++) sum += mix[line * across + i * along];
            for (int64_t i = 0; i < count; i++) mix[line * across + i * along] /= sum + eps;
        }
    };
    for (int64_t row = 0; row < count; row++) {
        float *line = mix + row * count, sum = 0;
        const float largest = *std::max_element(line, line + count);
        for (int64_t i = 0; i < count; i++) sum += line[i] = exponential(line[i] - largest);
        for (int64_t i = 0; i < count; i++) line[i] = line[i] / sum + eps;
    }
    for (int64_t i = 0; i < iterations; i++) {
        if (i) divide(1, count);
        divide(count, 1);
    }
}

// Writes sum(weights[j * apart] * rows[j]) + weight * added for `width` elements of rows that are `width` apart.
template <class From, class T>
void combine(const From* rows, int64_t count, const float* weights, int64_t apart, const T* added, float weight, T* to,
             int64_t width) {
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
        Lanes sum = added ? weight * wide(added + i) : Lanes{};
        for (int64_t j = 0; j < count; j++) sum += weights[j * apart] * wide(rows + j * width + i);
        narrow(sum, to + i);
    }
    for (; i < width; i++) {
        float sum = added ? weight * float(added[i]) : 0.0f;
        for (int64_t j = 0; j < count; j++) sum += weights[j * apart] * float(rows[j * width + i]);
        to[i] = T(sum);
    }
}

}  // namespace

// Without iterations, the projection has no rows for the mixing weights, which become those of the identity.
extern "C" void collapse_streams(const void* streams, const float* projection, const float* base, const float* scale,
                                 void* collapsed, float* post, float* mix, int dtype, int64_t tokens, int64_t count,
                                 int64_t hidden, int64_t iterations, float norm_eps, float eps, float magnitude,
                                 float post_eps) {
    const int64_t width = count * hidden, weights = count * (2 + (iterations ? count : 0));
    const int64_t held = std::min(kHeld, tokens);
    std::vector<float> values(held * width), squares(held), found(held * weights);
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        for (int64_t first = 0; first < tokens; first += kHeld) {
            const int64_t taken = std::min(kHeld, tokens - first), blocks = (taken + kTokens - 1) / kTokens;
#pragma omp parallel if (taken * width * weights > kGrain)
            {
#pragma omp for
                for (int64_t token = 0; token < taken; token++)
                    squares[token] = widen(static_cast<const T*>(streams) + (first + token) * width, width,
                                           values.data() + token * width);
#pragma omp for
                for (int64_t task = 0; task < blocks * weights; task++) {
                    const int64_t row = task / blocks, begin = task % blocks * kTokens;
                    multiply(projection + row * width, values.data() + begin * width, std::min(kTokens, taken - begin),
                             width, found.data() + begin * weights + row, weights);
                }
#pragma omp for
                for (int64_t token = 0; token < taken; token++) {
                    float* of = found.data() + token * weights;
                    const float norm = 1.0f / std::sqrt(squares[token] / float(width) + norm_eps);
                    for (int64_t i = 0; i < weights; i++)
                        of[i] = of[i] * norm * scale[std::min<int64_t>(i / count, 2)] + base[i];
                    float *after = post + (first + token) * count, *mixed = mix + (first + token) * count * count;
                    for (int64_t i = 0; i < count; i++) {
                        of[i] = sigmoid(of[i]) + eps;
                        after[i] = magnitude * sigmoid(of[count + i]) + post_eps;
                    }
                    for (int64_t i = 0; i < count * count; i++)
                        mixed[i] = iterations ? of[2 * count + i] : float(i % (count + 1) == 0);
                    if (iterations) normalise(mixed, count, iterations, eps);
                    combine(values.data() + token * width, count, of, 1, static_cast<const T*>(nullptr), 0.0f,
                            static_cast<T*>(collapsed) + (first + token) * hidden, hidden);
                }
            }
        }
    });
}

extern "C" void expand_streams(const void* streams, const void* output, const float* post, const float* mix, void* to,
                               int dtype, int64_t tokens, int64_t count, int64_t hidden) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for if (tokens * count * count * hidden > kGrain)
        for (int64_t row = 0; row < tokens * count; row++) {
            const int64_t token = row / count, stream = row % count;
            combine(static_cast<const T*>(streams) + token * count * hidden, count, mix + token * count * count + stream,
                    count, static_cast<const T*>(output) + token * hidden, post[row],
                    static_cast<T*>(to) + row * hidden, hidden);
        }
    });
}

REPLAYABLE(collapse_streams)
REPLAYABLE(expand_streams)
