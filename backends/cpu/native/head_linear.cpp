// Products of each head's rows with a matrix of the head. The matrices are read in place and once for few rows, and
// packed in panels for many. Sums are float32, in the order of inputs.
#include "head_linear.h"

#include <omp.h>

#include <algorithm>
#include <vector>

#include "elements.h"
#include "panels.h"
#include "products.h"
#include "replay.h"

namespace {

constexpr int64_t kPanelBytes = 128 << 10;  // of panels that a thread multiplies with all its rows, in a second cache
constexpr int64_t kTaskRows = 768;          // for which a thread packs panels once
constexpr int64_t kInputs = 8;              // whose rows a pass over the sums of few rows adds
constexpr int64_t kColumns = 128;           // of a unit of work for few rows

// Writes a column block of few rows' results, where a row of the weight has the factors of one input.
template <class T>
void add_inputs(const HeadProduct& product, const T* x, const T* weight, int64_t first, int64_t count, T* y,
                std::vector<float>& sums) {
    sums.assign(product.tokens * kColumns, 0.0f);
    const int64_t whole = count / kLanes * kLanes;
    for (int64_t input = 0; input < product.in; input += kInputs) {
        const int64_t taken = std::min(kInputs, product.in - input);
        const T* rows = weight + input * product.out + first;
        for (int64_t i = 0; i < taken; i++) __builtin_prefetch(rows + (kInputs + i) * product.out);
        for (int64_t token = 0; token < product.tokens; token++) {
            const T* factors = x + token * product.x_stride + input;
            float* to = sums.data() + token * kColumns;
            Lanes factor[kInputs];
            for (int64_t i = 0; i < kInputs; i++) factor[i] = Lanes{} + (i < taken ? float(factors[i]) : 0.0f);
            for (int64_t c = 0; c < whole; c += kLanes) {
                Lanes sum = load<Lanes>(to + c);
                if (taken == kInputs) {
#pragma GCC unroll 8
                    for (int64_t i = 0; i < kInputs; i++) sum += factor[i] * wide(rows + i * product.out + c);
                } else {
                    for (int64_t i = 0; i < taken; i++) sum += factor[i] * wide(rows + i * product.out + c);
                }
                std::memcpy(to + c, &sum, sizeof(sum));
            }
            for (int64_t c = whole; c < count; c++)
                for (int64_t i = 0; i < taken; i++) to[c] += float(factors[i]) * float(rows[i * product.out + c]);
        }
    }
    for (int64_t token = 0; token < product.tokens; token++)
        for (int64_t c = 0; c < count; c++) y[token * product.y_stride + first + c] = T(sums[token * kColumns + c]);
}

// Writes a column block of few rows' results, where a row of the weight has the factors of one result.
template <class T>
void add_products(const HeadProduct& product, const T* x, const T* weight, int64_t first, int64_t count, T* y) {
    thread_local Multiplication<T> multiplication;
    const T* others[kOthers];
    float sums[kOthers * kBlock];
    for (int64_t token = 0; token < product.tokens; token += kOthers) {
        const int64_t taken = std::min(kOthers, product.tokens - token);
        for (int64_t i = 0; i < taken; i++) others[i] = x + (token + i) * product.x_stride;
        multiplication.pack_others(others, taken, product.in);
        for (int64_t at = first; at < first + count; at += kBlock) {
            const int64_t block = std::min(kBlock, first + count - at);
            const int64_t following = std::min(at + kBlock, product.out - 1);
            multiplication.run(weight + at * product.in, block, sums, weight + following * product.in);
            for (int64_t i = 0; i < taken; i++)
                for (int64_t c = 0; c < block; c++)
                    y[(token + i) * product.y_stride + at + c] = T(sums[i * kBlock + c]);
        }
    }
}

template <class T>
void multiply_few(const HeadProduct& product, const T* x, const T* weight, T* y) {
    const int64_t blocks = (product.out + kColumns - 1) / kColumns;
    const bool parallel = product.heads * product.in * product.out > 1 << 16;
#pragma omp parallel for schedule(dynamic) if (parallel)
    for (int64_t unit = 0; unit < product.heads * blocks; unit++) {
        thread_local std::vector<float> sums;
        const int64_t head = unit / blocks, first = unit % blocks * kColumns;
        const int64_t count = std::min(kColumns, product.out - first);
        const T* from = weight + head * product.weight_head_stride;
        if (product.transposed)
            add_products(product, x + head * product.x_head_stride, from, first, count, y + head * product.y_head_stride);
        else
            add_inputs(product, x + head * product.x_head_stride, from, first, count, y + head * product.y_head_stride, sums);
    }
}

// Multiplies many rows: a band of them at a time with panels that a thread has packed.
template <class T, int64_t Band>
void multiply_many(const HeadProduct& product, const T* x, const T* weight, T* y) {
    const int64_t whole = up(product.in, Product<T>::kStep), steps = whole / kPair<T>;
    const int64_t most = std::max<int64_t>(1, kPanelBytes / int64_t(sizeof(Operand<T>)) / whole / kPanel) * kPanel;
    const int64_t groups = (product.out + most - 1) / most, size = up((product.out + groups - 1) / groups, kPanel);
    const int64_t parts = (product.tokens + kTaskRows - 1) / kTaskRows;
    const int64_t rows = up((product.tokens + parts - 1) / parts, Band);
#pragma omp parallel
    {
        Buffer<Operand<T>> panels(size * whole), band(Band * whole);
        Buffer<float> sums(Band * size);
        std::vector<const T*> pointers(std::max(size, product.in));
        std::vector<T> filled;
        PanelShapes<Band> shapes;
#pragma omp for schedule(dynamic) collapse(3)
        for (int64_t head = 0; head < product.heads; head++)
            for (int64_t group = 0; group < groups; group++)
                for (int64_t part = 0; part < parts; part++) {
                    const int64_t first = group * size, count = std::min(size, product.out - first);
                    const int64_t end = std::min((part + 1) * rows, product.tokens);
                    if (count <= 0) continue;
                    const T* matrix = weight + head * product.weight_head_stride;
                    if (product.transposed) {
                        for (int64_t i = 0; i < count; i++) pointers[i] = matrix + (first + i) * product.in;
                        pack_transposed<T>(pointers.data(), count, product.in, filled, panels.data());
                    } else {
                        for (int64_t i = 0; i < product.in; i++) pointers[i] = matrix + i * product.out + first;
                        if (whole != product.in) std::fill(panels.begin(), panels.end(), Operand<T>(0.0f));
                        pack_rows<T>(pointers.data(), product.in, count, whole * kPanel, panels.data());
                    }
                    for (int64_t row = part * rows; row < end; row += Band) {
                        const int64_t taken = std::min(Band, end - row);
                        for (int64_t r = 0; r < Band; r++) {
                            Operand<T>* to = band.data() + r * whole;
                            const T* from = x + (row + std::min(r, taken - 1)) * product.x_stride + head * product.x_head_stride;
                            std::fill(std::copy_n(from, product.in, to), band.data() + (r + 1) * whole, Operand<T>(0.0f));
                        }
                        multiply_band<T, Band, false>(band.data(), whole, panels.data(), whole * kPanel, int64_t(0), steps,
                                                      int64_t(0), up(count, kWhole), sums.data(), size);
                        for (int64_t r = 0; r < taken; r++) {
                            const float* from = sums.data() + r * size;
                            T* to = y + (row + r) * product.y_stride + head * product.y_head_stride + first;
                            int64_t c = 0;
                            for (; c + kLanes <= count; c += kLanes) narrow(load<Lanes>(from + c), to + c);
                            for (; c < count; c++) to[c] = T(from[c]);
                        }
                    }
                }
    }
}

}  // namespace

template <class T>
void head_linear(const HeadProduct& product, const T* x, const T* weight, T* y) {
    if (product.tokens <= kBand) return multiply_few(product, x, weight, y);
    with_band<T>([&](auto band) { multiply_many<T, band>(product, x, weight, y); });
}

template void head_linear(const HeadProduct&, const float*, const float*, float*);
template void head_linear(const HeadProduct&, const bfloat16*, const bfloat16*, bfloat16*);
template void head_linear(const HeadProduct&, const float16*, const float16*, float16*);

extern "C" void multiply_heads(const void* x, const void* weight, void* y, int dtype, int64_t tokens, int64_t heads,
                               int64_t in, int64_t out, int64_t x_stride, int64_t x_head_stride,
                               int64_t weight_head_stride, int transposed) {
    const HeadProduct product{tokens, heads, in, out, x_stride, x_head_stride, weight_head_stride, transposed != 0,
                              heads * out, out};
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        head_linear(product, static_cast<const T*>(x), static_cast<const T*>(weight), static_cast<T*>(y));
    });
}

REPLAYABLE(multiply_heads)
