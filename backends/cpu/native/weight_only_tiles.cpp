// The products of weight_only.cpp by AMX: up to 16 rows of x at a time with 32 rows of the weight, which are tiles as
// they lie in memory if they have 8 bits.
//
// An element of x is an integer of 16 bits, as there, in two halves: q = 256 high + low. Both are multiplied with bytes
// of the weight, exactly, and a product is 256 times the first sum plus the second.
#include <omp.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "claims.h"
#include "tiles.h"
#include "weight_only.h"

#ifdef HAL_TILES
namespace {

constexpr int64_t kTileRows = 16, kUnit = 2 * kTileRows;  // rows of the weight
constexpr int64_t kOfX = kLanes;                          // rows of x at a time: a column of sums is a lane

// Tiles 0 and 1 are rows of the weight, 2 and 3 the high and low halves of x, 4 to 7 sums.
TileShapes shapes_of(int64_t step) {
    TileShapes shapes;
    for (int tile = 0; tile < 2; tile++) shapes.set(tile, kTileRows, step), shapes.set(2 + tile, step / 4, 4 * kOfX);
    for (int tile = 4; tile < 8; tile++) shapes.set(tile, kTileRows, 4 * kOfX);
    return shapes;
}

// Some rows of x. All is ordered so that a lane is a row.
struct Rows {
    std::vector<int8_t> halves;       // [blocks][kBlockOfX / step] of two tiles: [step / 4][kOfX][4]
    std::vector<float> scales, sums;  // [blocks][kOfX]; [groups][kOfX], of the elements of x
};

template <class T>
void round(const WeightOnly& given, const T* x, int64_t stride, int64_t count, int64_t step, Rows& made) {
    const int64_t blocks = (given.width + kBlockOfX - 1) / kBlockOfX;
    made.halves.assign(blocks * kBlockOfX * kOfX * 2, 0);
    made.scales.assign(blocks * kOfX, 0.0f);
    made.sums.assign(given.scales.groups * kOfX, 0.0f);
    for (int64_t row = 0; row < count; row++)
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t first = block * kBlockOfX, taken = std::min(kBlockOfX, given.width - first);
            int32_t q[kBlockOfX];
            const float scale = round_block(x + row * stride + first, taken, q);
            made.scales[block * kOfX + row] = scale;
            int8_t high[kBlockOfX], low[kBlockOfX];
            for (int64_t i = 0; i < kBlockOfX; i++) high[i] = int8_t((q[i] + 128) >> 8), low[i] = int8_t(q[i]);
            int8_t* to = made.halves.data() + first * kOfX * 2 + row * 4;
            for (int64_t i = 0; i < kBlockOfX; i += 4) {
                int8_t* tile = to + i / step * step * kOfX * 2 + i % step * kOfX;
                std::memcpy(tile, high + i, 4), std::memcpy(tile + step * kOfX, low + i, 4);
            }
            add_to_groups(q, first, taken, scale, given.group, made.sums.data() + row, kOfX);
        }
}

// Writes a block of a row of the weight in bytes, with zeros past its end.
template <int Kind>
void unpack(const uint8_t* row, int64_t first, int64_t count, int8_t* to) {
    if constexpr (Kind == kBytes) {
        std::memcpy(to, row + first, count);
    } else {
        const uint8_t* from = row + first / 2;
#ifdef __AVX512VBMI__
        const __m512i table = _mm512_broadcast_i32x4(
            Kind == kFloat4 ? _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
                            : _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1));
        const int64_t bytes = count / 2;
        const __m512i nibble = _mm512_set1_epi8(15);
        const __mmask64 there = bytes == 64 ? ~__mmask64(0) : (__mmask64(1) << bytes) - 1;
        const __m512i packed = _mm512_maskz_loadu_epi8(there, from);
        const __m512i low = _mm512_shuffle_epi8(table, _mm512_and_si512(packed, nibble));
        const __m512i high = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble));
        const __m512i even = _mm512_unpacklo_epi8(low, high), odd = _mm512_unpackhi_epi8(low, high);
        const __m512i first_half = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
        _mm512_storeu_si512(to, _mm512_permutex2var_epi64(even, first_half, odd));
        const __m512i second_half = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
        _mm512_storeu_si512(to + 64, _mm512_permutex2var_epi64(even, second_half, odd));
#else
        for (int64_t i = 0; i < count; i++) {
            const int bits = from[i / 2] >> i % 2 * 4 & 15;
            to[i] = int8_t(Kind == kFloat4 ? kTwice[bits] : (bits ^ 8) - 8);
        }
#endif
    }
    std::fill(to + count, to + kBlockOfX, int8_t(0));
}

// A thread's memory.
struct Scratch {
    alignas(64) int8_t weight[kUnit * kBlockOfX];
    alignas(64) int32_t found[4][kTileRows * kOfX];  // high and low of the first rows of the weight, and of the others
    std::vector<float> sums, scales, zeros;          // [groups of rows of x][kUnit][kOfX]; [kUnit][groups]
};

// Adds the products of a unit's rows, `count` of them, with a block of all rows of x.
template <int Kind>
void multiply(const WeightOnly& given, const std::vector<Rows>& x, int64_t step, int64_t span, int64_t unit,
              int64_t block, int64_t count, Scratch& scratch) {
    const int64_t groups = given.scales.groups, first = block * kBlockOfX, left = std::min(kBlockOfX, given.width - first);
    const uint8_t* rows = given.weight + unit * kUnit * given.row_bytes();
    const int8_t* weight = scratch.weight;
    int64_t stride = kBlockOfX;
    if (Kind == kBytes && count == kUnit && left == kBlockOfX)
        weight = reinterpret_cast<const int8_t*>(rows) + first, stride = given.row_bytes();
    else
        for (int64_t r = 0; r < count; r++)
            unpack<Kind>(rows + r * given.row_bytes(), first, left, scratch.weight + r * kBlockOfX);
    for (size_t part = 0; part < x.size(); part++) {
        const Lanes scale = load<Lanes>(x[part].scales.data() + block * kOfX);
        const int8_t* halves = x[part].halves.data() + first * kOfX * 2;
        float* sums = scratch.sums.data() + part * kUnit * kOfX;
        for (int64_t begin = 0; begin < left; begin += span) {
            zero_tile<4>(), zero_tile<5>(), zero_tile<6>(), zero_tile<7>();
            for (int64_t i = begin; i < begin + span; i += step) {
                const int8_t* tile = halves + i * kOfX * 2;
                load_tile<0>(weight + i, stride), load_tile<2>(tile, 4 * kOfX);
                multiply_bytes<4, 0, 2>();
                load_tile<3>(tile + step * kOfX, 4 * kOfX);
                multiply_bytes<5, 0, 3>();
                load_tile<1>(weight + kTileRows * stride + i, stride);
                multiply_bytes<6, 1, 2>();
                multiply_bytes<7, 1, 3>();
            }
            store_tile<4>(scratch.found[0], 4 * kOfX), store_tile<5>(scratch.found[1], 4 * kOfX);
            store_tile<6>(scratch.found[2], 4 * kOfX), store_tile<7>(scratch.found[3], 4 * kOfX);
            const float* factor = scratch.scales.data() + (first + begin) / given.group;
            for (int64_t r = 0; r < kUnit; r++, factor += groups) {
                const auto* found = scratch.found[r / kTileRows * 2] + r % kTileRows * kOfX;
                const Ints high = load<Ints>(found), low = load<Ints>(found + kTileRows * kOfX);
                const Lanes sum = load<Lanes>(sums + r * kOfX) +
                                  __builtin_convertvector((high << 8) + low, Lanes) * (scale * *factor);
                std::memcpy(sums + r * kOfX, &sum, sizeof(sum));
            }
        }
    }
}

// Subtracts what zero points add, and writes the results of `count` rows of the weight.
template <class T>
void write(const WeightOnly& given, const std::vector<Rows>& x, int64_t first, int64_t count, Scratch& scratch, T* y) {
    const int64_t groups = given.scales.groups;
    for (int64_t r = 0; r < count; r++) {
        if (given.zeros.values) given.zeros.read(first + r, scratch.zeros.data());
        for (int64_t part = 0; part < int64_t(x.size()); part++) {
            Lanes sum = load<Lanes>(scratch.sums.data() + (part * kUnit + r) * kOfX);
            for (int64_t group = 0; given.zeros.values && group < groups; group++)
                sum -= load<Lanes>(x[part].sums.data() + group * kOfX) *
                       (scratch.scales[r * groups + group] * scratch.zeros[group]);
            for (int64_t lane = 0; lane < kOfX && part * kOfX + lane < given.rows; lane++)
                y[(part * kOfX + lane) * given.out + first + r] = T(sum[lane] + given.bias_of<T>(first + r));
        }
    }
}

template <int Kind, class T>
void run(const WeightOnly& given, const T* from, int64_t stride, T* y) {
    const int64_t span = given.group >= given.width ? kBlockOfX : std::min(kBlockOfX, given.group);
    const int64_t step = std::min<int64_t>(64, span), blocks = (given.width + kBlockOfX - 1) / kBlockOfX;
    thread_local std::vector<Rows> rounded;
    rounded.resize((given.rows + kOfX - 1) / kOfX);
    for (int64_t row = 0; row < given.rows; row += kOfX)
        round(given, from + row * stride, stride, std::min(kOfX, given.rows - row), step, rounded[row / kOfX]);
    const std::vector<Rows>& x = rounded;
    const int64_t groups = given.scales.groups, units = (given.out + kUnit - 1) / kUnit;
    const int64_t block_bytes = kBlockOfX * bits_of(Kind) / 8;
    const bool parallel = given.out * given.width > kSerial;
    Claims claims(units, parallel ? omp_get_max_threads() : 1);
#pragma omp parallel if (parallel)
    {
        thread_local Scratch scratch;
        scratch.scales.assign(kUnit * groups, 0.0f), scratch.zeros.resize(groups);
        std::fill(scratch.weight, scratch.weight + kUnit * kBlockOfX, int8_t(0));
        load_shapes(shapes_of(step));
        claims.run([&](int64_t unit, int64_t following) {
            const int64_t first = unit * kUnit, count = std::min(kUnit, given.out - first);
            for (int64_t r = 0; r < count; r++) given.scales.read(first + r, scratch.scales.data() + r * groups);
            scratch.sums.assign(x.size() * kUnit * kOfX, 0.0f);
            const uint8_t* next = given.weight + following * kUnit * given.row_bytes();
            for (int64_t block = 0; block < blocks; block++) {
                // The next unit's rows, in order.
                const int64_t bytes = std::min(kUnit, given.out - following * kUnit) * given.row_bytes();
                const int64_t end = std::min(bytes, (block + 1) * kUnit * block_bytes);
                for (int64_t at = block * kUnit * block_bytes; at < end; at += 64) __builtin_prefetch(next + at, 0, 2);
                multiply<Kind>(given, x, step, span, unit, block, count, scratch);
            }
            write(given, x, first, count, scratch, y);
        });
        release_tiles();
    }
}

}  // namespace
#endif

template <class T>
bool multiply_tiles(const WeightOnly& given, const T* x, int64_t stride, T* y) {
#ifdef HAL_TILES
    if (!tiles_allowed()) return false;
    if (given.numbers == kNibbles)
        run<kNibbles>(given, x, stride, y);
    else if (given.numbers == kFloat4)
        run<kFloat4>(given, x, stride, y);
    else
        run<kBytes>(given, x, stride, y);
    return true;
#else
    return false;
#endif
}

template bool multiply_tiles(const WeightOnly&, const bfloat16*, int64_t, bfloat16*);
template bool multiply_tiles(const WeightOnly&, const float16*, int64_t, float16*);
