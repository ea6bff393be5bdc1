// Norms, rotary embedding, activation and the choice of a token, each in one pass over its rows.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "elements.h"
#include "products.h"
#include "replay.h"

namespace {

constexpr int64_t kGrain = 1 << 15;  // elements; for fewer, starting threads costs more than it gains

// Rows of `width` elements with unit stride; row (i, j) begins at i * outer + j * inner.
struct Rows {
    int64_t count, heads, width, outer, inner;
    int64_t operator()(int64_t row) const { return row / heads * outer + row % heads * inner; }
};

// Compilers convert float16 one element at a time, so its rows are converted by vectors to float32 copies and back.
void widen(const float16* from, float* to, int64_t count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        const Lanes values = wide(from + i);
        std::memcpy(to + i, &values, sizeof(values));
    }
    for (; i < count; i++) to[i] = from[i];
}

void narrow(const float* from, float16* to, int64_t count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) ::narrow(load<Lanes>(from + i), to + i);
    for (; i < count; i++) to[i] = float16(from[i]);
}

float* copies(int64_t count) {
    thread_local std::vector<float> held;
    if (int64_t(held.size()) < count) held.resize(count);
    return held.data();
}

template <class T, class W>
void normalise(const T* x, const W* weight, T* __restrict y, int64_t width, float eps) {
    float sum = 0;
    for (int64_t i = 0; i < width; i++) sum += float(x[i]) * float(x[i]);
    float scale = 1.0f / std::sqrt(sum / float(width) + eps);
    for (int64_t i = 0; i < width; i++) y[i] = T(float(x[i]) * scale * float(weight[i]));
}

void normalise(const float16* x, const float* weight, float16* y, int64_t width, float eps) {
    float *row = copies(3 * width), *result = row + 2 * width;
    widen(x, row, width);
    normalise(row, weight, result, width, eps);
    narrow(result, y, width);
}

void normalise(const float16* x, const float16* weight, float16* y, int64_t width, float eps) {
    float *row = copies(3 * width), *weights = row + width, *result = weights + width;
    widen(x, row, width);
    widen(weight, weights, width);
    normalise(row, weights, result, width, eps);
    narrow(result, y, width);
}

// Runs `body(T{}, W{})` for the element types of rows and of a norm's weight or the angles of positions, which are
// float32 or of the rows' type.
template <class Body>
void with_types(int dtype, bool wide, Body body) {
    with_type(dtype, [&](auto type) {
        if (wide)
            body(type, float{});
        else
            body(type, type);
    });
}

template <class T>
void add(const T* left, const T* right, T* __restrict sum, int64_t width) {
    for (int64_t i = 0; i < width; i++) sum[i] = T(float(left[i]) + float(right[i]));
}

void add(const float16* left, const float16* right, float16* sum, int64_t width) {
    float *first = copies(3 * width), *second = first + width, *result = second + width;
    widen(left, first, width);
    widen(right, second, width);
    add(first, second, result, width);
    narrow(result, sum, width);
}

// Rotates pairs of `width` elements: adjacent ones if `interleaved`, else those of both halves.
template <bool interleaved, class T, class A>
void rotate(const T* x, const A* cos, const A* sin, T* __restrict y, int64_t width) {
    const int64_t half = width / 2, step = interleaved ? 2 : 1, apart = interleaved ? 1 : half;
    for (int64_t i = 0; i < half; i++) {
        const int64_t at = i * step;
        float first = x[at], second = x[at + apart];
        y[at] = T(first * float(cos[at]) - second * float(sin[at]));
        y[at + apart] = T(second * float(cos[at + apart]) + first * float(sin[at + apart]));
    }
}

template <bool interleaved>
void rotate(const float16* x, const float* cos, const float* sin, float16* y, int64_t width) {
    float *row = copies(4 * width), *result = row + width;
    widen(x, row, width);
    rotate<interleaved>(row, cos, sin, result, width);
    narrow(result, y, width);
}

template <bool interleaved>
void rotate(const float16* x, const float16* cos, const float16* sin, float16* y, int64_t width) {
    float *c = copies(4 * width) + 2 * width, *s = c + width;
    widen(cos, c, width);
    widen(sin, s, width);
    rotate<interleaved>(x, c, s, y, width);
}

struct Silu {
    float operator()(float x) const { return x / (1.0f + exponential(-x)); }
};

struct Gelu {
    float operator()(float x) const { return 0.5f * x * (1.0f + std::erf(x * 0.70710678f)); }
};

// x times the sigmoid of twice the argument of the approximation's tanh.
struct GeluTanh {
    float operator()(float x) const { return x / (1.0f + exponential(-1.5957691216f * (x + 0.044715f * x * x * x))); }
};

template <class Function, class T>
void activate(const T* gate, const T* up, T* __restrict y, int64_t width) {
    for (int64_t i = 0; i < width; i++) y[i] = T(Function()(float(gate[i])) * float(up[i]));
}

template <class Function>
void activate(const float16* gate, const float16* up, float16* y, int64_t width) {
    float *gates = copies(3 * width), *ups = gates + width, *result = ups + width;
    widen(gate, gates, width);
    widen(up, ups, width);
    activate<Function>(gates, ups, result, width);
    narrow(result, y, width);
}

template <class Function>
void activate_rows(const void* x, void* y, int dtype, int64_t count, int64_t width) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for if (count * width > kGrain)
        for (int64_t row = 0; row < count; row++) {
            const T *gate = static_cast<const T*>(x) + row * 2 * width, *up = gate + width;
            activate<Function>(gate, up, static_cast<T*>(y) + row * width, width);
        }
    });
}

// Whether a maximum gives way to a value. A NaN exceeds all others.
inline bool exceeds(float value, float top) { return top == top && !(value <= top); }

// Returns the largest element.
template <class T>
float most(const T* x, int64_t count) {
    float top = -std::numeric_limits<float>::infinity();
    Lanes held = Lanes{} + top;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        const Lanes found = wide(x + i);
        held = ((held == held) & ~(found <= held)) ? found : held;
    }
    for (int lane = 0; lane < kLanes; lane++) top = exceeds(held[lane], top) ? held[lane] : top;
    for (; i < count; i++) top = exceeds(x[i], top) ? float(x[i]) : top;
    return top;
}

constexpr int64_t kPart = 4096;  // elements whose largest is known at a time; only one part is searched for its place

// Returns the index of the first of the largest elements.
template <class T>
int64_t largest(const T* x, int64_t width) {
    float top = -std::numeric_limits<float>::infinity();
    int64_t first = 0;
    for (int64_t start = 0; start < width; start += kPart) {
        const float found = most(x + start, std::min(kPart, width - start));
        if (exceeds(found, top)) top = found, first = start;
    }
    while (first < width - 1 && float(x[first]) != top && (top == top || x[first] == x[first])) first++;
    return first;
}

// Rotates the first `width` elements of each row, and copies the others.
template <bool interleaved, class T, class A>
void rotate_rows(const T* x, const A* cos, const A* sin, T* y, Rows rows, int64_t width) {
#pragma omp parallel for if (rows.count * rows.width > kGrain)
    for (int64_t row = 0; row < rows.count; row++) {
        int64_t angle = row / rows.heads * width;
        const T* from = x + rows(row);
        T* to = y + row * rows.width;
        rotate<interleaved>(from, cos + angle, sin + angle, to, width);
        std::copy(from + width, from + rows.width, to + width);
    }
}

}  // namespace

extern "C" void rms_norm(const void* x, const void* weight, void* y, int dtype, int wide_weight, int64_t count,
                         int64_t heads, int64_t width, int64_t outer, int64_t inner, float eps) {
    Rows rows{count, heads, width, outer, inner};
    with_types(dtype, wide_weight, [&](auto type, auto of_weight) {
        using T = decltype(type);
        using W = decltype(of_weight);
#pragma omp parallel for if (count * width > kGrain)
        for (int64_t row = 0; row < count; row++)
            normalise(static_cast<const T*>(x) + rows(row), static_cast<const W*>(weight),
                      static_cast<T*>(y) + row * width, width, eps);
    });
}

// The sum is rounded before the norm reads it. All contiguous.
extern "C" void add_rms_norm(const void* x, const void* residual, const void* weight, void* y, void* sum, int dtype,
                             int wide_weight, int64_t count, int64_t width, float eps) {
    with_types(dtype, wide_weight, [&](auto type, auto of_weight) {
        using T = decltype(type);
        using W = decltype(of_weight);
#pragma omp parallel for if (count * width > kGrain)
        for (int64_t row = 0; row < count; row++) {
            const T *left = static_cast<const T*>(x) + row * width,
                    *right = static_cast<const T*>(residual) + row * width;
            T* hidden = static_cast<T*>(sum) + row * width;
            add(left, right, hidden, width);
            normalise(hidden, static_cast<const W*>(weight), static_cast<T*>(y) + row * width, width, eps);
        }
    });
}

extern "C" void rotary_embedding(const void* query, const void* key, const void* cos, const void* sin, void* new_query,
                                 void* new_key, int dtype, int wide_angles, int interleaved, int64_t tokens,
                                 int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t rotary_dim,
                                 int64_t query_outer, int64_t query_inner, int64_t key_outer, int64_t key_inner) {
    with_types(dtype, wide_angles, [&](auto type, auto of_angles) {
        using T = decltype(type);
        using A = decltype(of_angles);
        const A *c = static_cast<const A*>(cos), *s = static_cast<const A*>(sin);
        auto both = [&](auto rotating) {
            rotating(static_cast<const T*>(query), c, s, static_cast<T*>(new_query),
                     Rows{tokens * heads, heads, head_dim, query_outer, query_inner}, rotary_dim);
            rotating(static_cast<const T*>(key), c, s, static_cast<T*>(new_key),
                     Rows{tokens * kv_heads, kv_heads, head_dim, key_outer, key_inner}, rotary_dim);
        };
        if (interleaved)
            both(rotate_rows<true, T, A>);
        else
            both(rotate_rows<false, T, A>);
    });
}

extern "C" void silu_and_mul(const void* x, void* y, int dtype, int64_t count, int64_t width) {
    activate_rows<Silu>(x, y, dtype, count, width);
}

extern "C" void gelu_and_mul(const void* x, void* y, int dtype, int tanh, int64_t count, int64_t width) {
    if (tanh)
        activate_rows<GeluTanh>(x, y, dtype, count, width);
    else
        activate_rows<Gelu>(x, y, dtype, count, width);
}

extern "C" void greedy_sample(const void* logits, int64_t* tokens, int dtype, int64_t count, int64_t width,
                              int64_t stride) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for if (count * width > kGrain)
        for (int64_t row = 0; row < count; row++)
            tokens[row] = largest(static_cast<const T*>(logits) + row * stride, width);
    });
}

REPLAYABLE(rms_norm)
REPLAYABLE(add_rms_norm)
REPLAYABLE(rotary_embedding)
REPLAYABLE(silu_and_mul)
REPLAYABLE(gelu_and_mul)
REPLAYABLE(greedy_sample)
