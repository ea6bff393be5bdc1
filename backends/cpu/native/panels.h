// Products of rows with panels of columns, for many rows: each step multiplies an element of a few rows with a vector
// of columns. Sums are float32 and stay in registers.
//
// Panels are packed: step by step, kPanel columns. Where the CPU multiplies pairs of elements, a step is a pair.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "elements.h"
#include "products.h"
#include "tiles.h"

// Sums of kBand rows by kPanel columns stay in registers: 24 of 32 with AVX-512 or NEON, 12 of 16 with AVX2.
constexpr int kBand = 6;
constexpr int kPanelVectors = kRegisters >= 32 ? 4 : 2;
constexpr int64_t kPanel = kPanelVectors * kLanes;

// Elements of a lane: 2 where the CPU multiplies pairs.
template <class T>
constexpr int64_t kPair = Product<T>::kStep / kLanes;

#if defined(HAL_TILES) && defined(__AVX512BF16__)
#define HAL_PANEL_TILES
constexpr int64_t kTileBand = 32;  // rows, columns and elements that four tiles of sums take at a time
constexpr int64_t kWhole = kTileBand;
#else
constexpr int64_t kWhole = kLanes;  // rows that are packed come in multiples of this
#endif

// sums[r * sums_stride + c] = rows[r * stride] . columns[c], or adds it, for kBand rows and V vectors of columns of a
// panel, whose lanes are kPanel apart from step to step.
template <class T, int V, bool Add>
void multiply(const Operand<T>* rows, int64_t stride, const Operand<T>* columns, int64_t steps, float* sums,
              int64_t sums_stride) {
    using P = Product<T>;
    Lanes held[kBand][V] = {};
    for (int64_t step = 0; step < steps; step++, rows += kPair<T>, columns += kPanel * kPair<T>) {
        typename P::Vector right[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) right[v] = load<typename P::Vector>(columns + v * P::kStep);
#pragma GCC unroll 6
        for (int r = 0; r < kBand; r++) {
            const auto left = P::repeated(rows + r * stride);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) P::add(held[r][v], left, right[v]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < kBand; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            float* to = sums + r * sums_stride + v * kLanes;
            if constexpr (Add) held[r][v] += load<Lanes>(to);
            std::memcpy(to, &held[r][v], sizeof(Lanes));
        }
}

// Multiplies the steps from `begin` to `end` of the columns from `first`, where a panel starts, to `last`.
template <class T, bool Add>
void multiply_panels(const Operand<T>* rows, int64_t stride, const Operand<T>* panels, int64_t panel_size,
                     int64_t begin, int64_t end, int64_t first, int64_t last, float* sums, int64_t sums_stride) {
    rows += begin * kPair<T>;
    for (int64_t column = first; column < last; column += kPanel) {
        const Operand<T>* panel = panels + column / kPanel * panel_size + begin * kPanel * kPair<T>;
        auto run = [&](auto vectors) {
            multiply<T, std::min<int>(vectors, kPanelVectors), Add>(rows, stride, panel, end - begin, sums + column,
                                                                    sums_stride);
        };
        switch ((last - column + kLanes - 1) / kLanes) {
            case 1:
                run(std::integral_constant<int, 1>{});
                break;
            case 2:
                run(std::integral_constant<int, 2>{});
                break;
            case 3:
                run(std::integral_constant<int, 3>{});
                break;
            default:
                run(std::integral_constant<int, kPanelVectors>{});
        }
    }
}

#ifdef HAL_PANEL_TILES
// Sets the shapes of the tiles, all of them whole: 0 to 3 are sums, of both halves of the rows times both halves of the
// columns; 4 and 5 rows; 6 and 7 columns.
inline void load_panel_shapes() {
    TileShapes shapes;
    for (int tile = 0; tile < 8; tile++) shapes.set(tile, 16, 64);
    load_shapes(shapes);
}

// multiply_panels of kTileBand rows, where columns and elements are multiples of kTileBand.
template <bool Add>
void multiply_panel_tiles(const bfloat16* rows, int64_t stride, const bfloat16* panels, int64_t panel_size,
                          int64_t begin, int64_t end, int64_t first, int64_t last, float* sums, int64_t sums_stride) {
    constexpr int64_t kHalf = kTileBand / 2, kStep = kPanel * kPair<bfloat16>;
    const int64_t row_bytes = 2 * stride, sum_bytes = 4 * sums_stride;
    for (int64_t column = first; column < last; column += kTileBand) {
        const bfloat16* from = panels + column / kPanel * panel_size + begin * kStep + column % kPanel * kPair<bfloat16>;
        float *upper = sums + column, *lower = upper + kHalf * sums_stride;
        if constexpr (Add) {
            load_tile<0>(upper, sum_bytes), load_tile<1>(upper + kHalf, sum_bytes);
            load_tile<2>(lower, sum_bytes), load_tile<3>(lower + kHalf, sum_bytes);
        } else {
            zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
        }
        for (int64_t step = begin; step < end; step += kHalf, from += kHalf * kStep) {
            const bfloat16* left = rows + step * kPair<bfloat16>;
            load_tile<4>(left, row_bytes);
            load_tile<6>(from, 2 * kStep);
            multiply_pairs<0, 4, 6>();
            load_tile<7>(from + kHalf * kPair<bfloat16>, 2 * kStep);
            multiply_pairs<1, 4, 7>();
            load_tile<5>(left + kHalf * stride, row_bytes);
            multiply_pairs<2, 5, 6>();
            multiply_pairs<3, 5, 7>();
        }
        store_tile<0>(upper, sum_bytes), store_tile<1>(upper + kHalf, sum_bytes);
        store_tile<2>(lower, sum_bytes), store_tile<3>(lower + kHalf, sum_bytes);
    }
}
#endif

// Holds the shapes of the tiles, for bands of kTileBand rows.
template <int64_t Band>
struct PanelShapes {
#ifdef HAL_PANEL_TILES
    PanelShapes() {
        if constexpr (Band == kTileBand) load_panel_shapes();
    }
    ~PanelShapes() {
        if constexpr (Band == kTileBand) release_tiles();
    }
#else
    PanelShapes() {}
#endif
};

// Multiplies a band of rows with panels: kTileBand of them in tiles, or kBand.
template <class T, int64_t Band, bool Add, class... Arguments>
inline void multiply_band(Arguments... arguments) {
#ifdef HAL_PANEL_TILES
    if constexpr (Band == kTileBand) return multiply_panel_tiles<Add>(arguments...);
#endif
    if constexpr (Band == kBand) multiply_panels<T, Add>(arguments...);
}

// Calls `run` with the number of rows of a band, as a constant.
template <class T, class Run>
inline void with_band(Run run) {
#ifdef HAL_PANEL_TILES
    if constexpr (std::is_same_v<T, bfloat16>)
        if (tiles_allowed()) return run(std::integral_constant<int64_t, kTileBand>{});
#endif
    run(std::integral_constant<int64_t, kBand>{});
}

constexpr int64_t kAhead = 8;  // rows to prefetch: their strides are too long for the CPU to foresee

template <class T>
inline void prefetch(const T* row, int64_t count) {
    for (int64_t i = 0; i < count; i += int64_t(64 / sizeof(T))) __builtin_prefetch(row + i);
}

// Writes panels whose columns are the rows: their steps are the elements of a row, filled up with zeros. Columns past
// the last of the rows repeat it up to kWhole.
template <class T>
inline void pack_transposed(const T* const* rows, int64_t count, int64_t width, std::vector<T>& scratch,
                            Operand<T>* panels) {
    constexpr int64_t kStep = Product<T>::kStep;
    const int64_t whole = up(width, kStep);
    if (whole != width) scratch.assign(kLanes * whole, T(0.0f));
    for (int64_t row = 0; row < up(count, kWhole); row += kLanes) {
        const T *from[kLanes], *ahead[kLanes];
        for (int i = 0; i < kLanes; i++) {
            ahead[i] = rows[std::min(row + kLanes + i, count - 1)];
            from[i] = rows[std::min(row + i, count - 1)];
            if (whole != width) from[i] = std::copy_n(from[i], width, scratch.data() + i * whole) - width;
        }
        Operand<T>* to = panels + row / kPanel * whole * kPanel + row % kPanel * kPair<T>;
        for (int64_t at = 0; at < whole; at += kStep, to += kLanes * kPanel * kPair<T>) {
            Lanes block[kLanes];
            for (int i = 0; i < kLanes; i++) {
                __builtin_prefetch(ahead[i] + at);
                const auto vector = Product<T>::widened(from[i] + at);
                std::memcpy(&block[i], &vector, sizeof(Lanes));
            }
            transpose(block);
            for (int i = 0; i < kLanes; i++) std::memcpy(to + i * kPanel * kPair<T>, &block[i], sizeof(Lanes));
        }
    }
}

// Writes panels whose steps are the rows, and which are `panel_size` elements apart. Rows past the last are 0: up to
// kWhole, where the CPU multiplies pairs.
template <class T>
inline void pack_rows(const T* const* rows, int64_t count, int64_t width, int64_t panel_size, Operand<T>* panels) {
    for (int64_t column = 0; column < width; column += kPanel, panels += panel_size) {
        const int64_t taken = std::min(kPanel, width - column);
        Operand<T>* to = panels;
        int64_t row = 0;
        for (; row < count; row += kPair<T>, to += kPanel * kPair<T>) {
            const T* from = rows[row] + column;
            prefetch(rows[std::min(row + kAhead, count - 1)] + column, taken);
            if constexpr (kPair<T> == 1) {
                int64_t i = 0;
                for (; i + kLanes <= taken; i += kLanes) {
                    const Lanes values = wide(from + i);
                    std::memcpy(to + i, &values, sizeof(values));
                }
                for (; i < taken; i++) to[i] = from[i];
            } else {
                const T* next = row + 1 < count ? rows[row + 1] + column : nullptr;
                int64_t i = 0;
                if (next)
                    for (; i + kLanes <= taken; i += kLanes) Product<T>::interleave(from + i, next + i, to + 2 * i);
                for (; i < taken; i++) to[2 * i] = from[i], to[2 * i + 1] = next ? next[i] : T(0.0f);
            }
        }
        if constexpr (kPair<T> == 2) std::fill_n(to, (up(count, kWhole) - row) * kPanel, T(0.0f));
    }
}
