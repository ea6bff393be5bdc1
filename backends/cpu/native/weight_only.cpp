// Projections of up to 64 rows, or of those of experts, with weights of 8 or 4 bits in groups, which are read in place.
//
// Where the processor multiplies integers, x is rounded to 16-bit ones, with a scale for each block of x. This is exact to
// 2**-15 of the block's largest element, which is less than bfloat16's rounding. A weight is then never widened further:
// one or two rows of x are multiplied here, more in weight_only_columns.cpp, or in weight_only_tiles.cpp with AMX.
// Otherwise some rows of a weight at a time are widened to x's type, in a core's cache.
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "claims.h"
#include "elements.h"
#include "products.h"
#include "replay.h"
#include "weight_only.h"

namespace {

constexpr int64_t kFewestForTiles = 8;  // rows of x, from which tiles of AMX are faster

template <class T>
void run_widened(const WeightOnly& given, const T* x, int64_t x_stride, T* y) {
    const int64_t groups = given.scales.groups;
    const T* others[kOthers];
    for (int64_t row = 0; row < given.rows; row++) others[row] = x + row * x_stride;
#pragma omp parallel if (given.out * given.width > kSerial)
    {
        Multiplication<T> multiplication;
        multiplication.pack_others(others, given.rows, given.width);
        std::vector<T> rows(kBlock * given.width);
        std::vector<float> scales(groups), zeros(given.zeros.values ? groups : 0);
        float sums[kOthers * kBlock];
#pragma omp for schedule(dynamic)
        for (int64_t first = 0; first < given.out; first += kBlock) {
            const int64_t count = std::min(kBlock, given.out - first);
            for (int64_t i = 0; i < count; i++) {
                given.scales.read(first + i, scales.data());
                if (given.zeros.values) given.zeros.read(first + i, zeros.data());
                widen(given, first + i, scales.data(), given.zeros.values ? zeros.data() : nullptr,
                      rows.data() + i * given.width);
            }
            multiplication.run(rows.data(), count, sums);
            for (int64_t m = 0; m < given.rows; m++)
                for (int64_t i = 0; i < count; i++)
                    y[m * given.out + first + i] = T(sums[m * kBlock + i] + given.bias_of<T>(first + i));
        }
    }
}

#ifdef __AVX512VNNI__
constexpr int64_t kFew = 2;         // rows of x, up to which this is faster than columns
constexpr int64_t kAhead = 4096;    // bytes of the weight to prefetch ahead

// Rows of x as integers. Those of a register's 16-bit lanes are together: elements 0, 2, 4... and 1, 3, 5... for weights
// of 8 bits; every fourth one for those of 4 bits.
struct Integers {
    int64_t blocks, groups;           // groups in whole vectors
    std::vector<int16_t> values;      // [rows][blocks][kBlockOfX]
    std::vector<float> scales, sums;  // [rows][blocks]; [rows][groups], of the elements of x
};

// Writes a block in the order of `Integers`.
template <int Kind>
inline void order(const int32_t* q, int16_t* to) {
    struct Indices {
        uint16_t of[32];
    };
    static constexpr auto each_second = [](int first) constexpr {
        Indices made{};
        for (int i = 0; i < 32; i++) made.of[i] = uint16_t(2 * i + first);
        return made;
    };
    static constexpr Indices kEven = each_second(0), kOdd = each_second(1);
    const __m512i even = load<__m512i>(kEven.of), odd = load<__m512i>(kOdd.of);
    __m512i narrow[4], parts[4];
    for (int i = 0; i < 4; i++) {
        const __m256i low = _mm512_maskz_cvtepi32_epi16(0xffff, load<__m512i>(q + 32 * i));
        const __m256i high = _mm512_maskz_cvtepi32_epi16(0xffff, load<__m512i>(q + 32 * i + 16));
        narrow[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
    for (int i = 0; i < 4; i += 2) {
        parts[i] = _mm512_permutex2var_epi16(narrow[i], even, narrow[i + 1]);
        parts[i + 1] = _mm512_permutex2var_epi16(narrow[i], odd, narrow[i + 1]);
    }
    if constexpr (Kind == kBytes) return void(std::memcpy(to, parts, sizeof(parts)));
    for (int i = 0; i < 2; i++) {
        narrow[i] = _mm512_permutex2var_epi16(parts[i], even, parts[i + 2]);
        narrow[i + 2] = _mm512_permutex2var_epi16(parts[i], odd, parts[i + 2]);
    }
    std::memcpy(to, narrow, sizeof(narrow));
}

template <int Kind, class T>
void round(const WeightOnly& given, const T* x, int64_t stride, Integers& made) {
    const int64_t blocks = (given.width + kBlockOfX - 1) / kBlockOfX, groups = up(given.scales.groups, kLanes);
    made.blocks = blocks, made.groups = groups;
    made.values.resize(given.rows * blocks * kBlockOfX);
    made.scales.resize(given.rows * blocks), made.sums.assign(given.rows * groups, 0.0f);
    for (int64_t row = 0; row < given.rows; row++)
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t first = block * kBlockOfX, count = std::min(kBlockOfX, given.width - first);
            int32_t q[kBlockOfX];
            const float scale = round_block(x + row * stride + first, count, q);
            made.scales[row * blocks + block] = scale;
            order<Kind>(q, made.values.data() + (row * blocks + block) * kBlockOfX);
            add_to_groups(q, first, count, scale, given.group, made.sums.data() + row * groups, 1);
        }
}

// The scales of the lanes of a register of sums, from those of the groups of a row.
struct Spread {
    std::vector<int64_t> first;  // by register: the group of its first lane
    __m512i of_lane;             // the further group of each lane

    // `together` elements are summed in a register.
    Spread(int64_t registers, int64_t together, int64_t group, int64_t groups) : first(registers) {
        for (int64_t i = 0; i < registers; i++) first[i] = std::min(i * together / group, groups - 1);
        const int64_t of_group = groups == 1 ? together : std::min(group, together);
        int32_t lanes[kLanes];
        for (int lane = 0; lane < kLanes; lane++) lanes[lane] = int32_t(lane * (together / kLanes) / of_group);
        of_lane = load<__m512i>(lanes);
    }
    Lanes operator()(const float* scales, int64_t at) const {
        const __m512 four = _mm512_castps128_ps512(_mm_loadu_ps(scales + first[at]));
        return Lanes(_mm512_permutexvar_ps(of_lane, four));
    }
};

// Adds `Count` registers of a row of the weight times the integers of a row of x. Weights of 4 bits are taken as w + 8.
template <int Count>
inline __m512i dots(const __m512i* weight, const int16_t* x) {
    __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int i = 0; i < Count; i++) sum = _mm512_dpwssd_epi32(sum, weight[i], load<__m512i>(x + 32 * i));
    return sum;
}

// Widens 64 bytes of the weight to registers of 16-bit integers.
template <int Kind>
inline void unpack(__m512i packed, __m512i* to) {
    if constexpr (Kind == kBytes) {
        to[0] = _mm512_srai_epi16(_mm512_slli_epi16(packed, 8), 8), to[1] = _mm512_srai_epi16(packed, 8);
    } else if constexpr (Kind == kFloat4) {
        // An index is the last five bits; the table has each number for both values of the first one.
        const __m512i table = load<__m512i>(kTwice);
        to[0] = _mm512_permutexvar_epi16(packed, table);
        to[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(packed, 4), table);
        to[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(packed, 8), table);
        to[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(packed, 12), table);
    } else {
        const __m512i nibble = _mm512_set1_epi16(15);
        packed = _mm512_xor_si512(packed, _mm512_set1_epi8(int8_t(0x88)));
        to[0] = _mm512_and_si512(packed, nibble);
        to[1] = _mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble);
        to[2] = _mm512_and_si512(_mm512_srli_epi16(packed, 8), nibble);
        to[3] = _mm512_srli_epi16(packed, 12);
    }
}

// Writes the sums of each lane of a row of the weight times `Rows` rows of x to held[m * kLanes]. Whole: whether the
// weights of a block of x have one scale in a lane.
template <int Kind, bool Whole, int Rows>
inline void multiply(const WeightOnly& given, const Integers& x, const Spread& spread, const uint8_t* line,
                     const float* scales, Lanes* held) {
    constexpr int64_t kParts = Whole ? 1 : 2, kVectors = 4 / kParts, kBytes = kBlockOfX / kParts * bits_of(Kind) / 8;
    const int64_t bytes = given.row_bytes(), blocks = x.blocks, stride = blocks * kBlockOfX;
    const int16_t* values = x.values.data();
    const float* of_x = x.scales.data();
    Lanes sums[Rows][kParts] = {};
    auto add = [&](int64_t block, auto read) __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int64_t part = 0; part < kParts; part++) {
            const int64_t at = block * kParts + part;
            __m512i weight[kVectors];
#pragma GCC unroll 2
            for (int64_t byte = 0; byte < kBytes; byte += 64) {
                unpack<Kind>(read(at * kBytes + byte), weight + byte / 32);
                __builtin_prefetch(line + at * kBytes + byte + kAhead);
            }
            const Lanes scale = spread(scales, at);
#pragma GCC unroll 4
            for (int m = 0; m < Rows; m++) {
                const __m512i sum = dots<kVectors>(weight, values + m * stride + block * kBlockOfX + part * 64);
                sums[m][part] += Lanes(_mm512_cvtepi32_ps(sum)) * (scale * of_x[m * blocks + block]);
            }
        }
    };
    const int64_t whole = given.width / kBlockOfX;
    for (int64_t block = 0; block < whole; block++)
        add(block, [&](int64_t at) { return load<__m512i>(line + at); });
    if (whole < blocks)
        add(whole, [&](int64_t at) {
            const int64_t left = std::clamp<int64_t>(bytes - at, 0, 64);
            return _mm512_maskz_loadu_epi8(left == 64 ? ~__mmask64(0) : (__mmask64(1) << left) - 1, line + at);
        });
    for (int m = 0; m < Rows; m++) held[m * kLanes] = Whole ? sums[m][0] : sums[m][0] + sums[m][kParts - 1];
}

template <int Kind, bool Whole, class T>
void run_integers(const WeightOnly& given, const T* from, int64_t stride, T* y) {
    thread_local Integers x;
    round<Kind>(given, from, stride, x);
    const Integers& integers = x;
    constexpr int64_t kTogether = Whole ? kBlockOfX : kBlockOfX / 2;  // elements whose lanes are scaled together
    constexpr float kOffset = Kind == kNibbles ? 8 : 0;
    const bool corrected = Kind == kNibbles || given.zeros.values;
    const int64_t groups = x.groups;
    const Spread spread(x.blocks * kBlockOfX / kTogether, kTogether, given.group, given.scales.groups);
    const bool parallel = given.out * given.width > kSerial;
    Claims claims((given.out + kLanes - 1) / kLanes, parallel ? omp_get_max_threads() : 1);
#pragma omp parallel if (parallel)
    {
        std::vector<float> scales(groups + 3), zeros(groups);  // Spread reads four at a time
        claims.run([&](int64_t unit, int64_t) {
            const int64_t begin = unit * kLanes;
            const int64_t taken = std::min<int64_t>(kLanes, given.out - begin);
            Lanes held[kFew * kLanes] = {};
            for (int64_t r = 0; r < taken; r++) {
                given.scales.read(begin + r, scales.data());
                const auto multiply_rows = given.rows == 1 ? multiply<Kind, Whole, 1> : multiply<Kind, Whole, kFew>;
                multiply_rows(given, integers, spread, given.weight + (begin + r) * given.row_bytes(), scales.data(),
                              held + r);
                if (!corrected) continue;
                if (given.zeros.values) given.zeros.read(begin + r, zeros.data());
                for (int64_t group = 0; group < groups; group += kLanes) {
                    const Lanes less = load<Lanes>(scales.data() + group) * (load<Lanes>(zeros.data() + group) + kOffset);
                    for (int64_t m = 0; m < given.rows; m++)
                        held[m * kLanes + r] -= load<Lanes>(integers.sums.data() + m * groups + group) * less;
                }
            }
            for (int64_t m = 0; m < given.rows; m++) {
                const Lanes sums = sums_of(held + m * kLanes);
                for (int64_t i = 0; i < taken; i++)
                    y[m * given.out + begin + i] = T(sums[i] + given.bias_of<T>(begin + i));
            }
        });
    }
}
#endif

template <class T>
void run(const WeightOnly& given, const T* x, int64_t x_stride, T* y) {
    if constexpr (sizeof(T) == 2) {
        if (!spreads(given.width, given.group, given.numbers)) return run_widened(given, x, x_stride, y);
        if (given.rows >= kFewestForTiles && multiply_tiles(given, x, x_stride, y)) return;
#ifdef __AVX512VNNI__
        if (given.rows > kFew) return multiply_columns(given, x, x_stride, y);
        if (given.numbers == kNibbles) return run_integers<kNibbles, true>(given, x, x_stride, y);
        if (given.numbers == kFloat4) return run_integers<kFloat4, true>(given, x, x_stride, y);
        if (given.group >= given.width || given.group % kBlockOfX == 0)
            return run_integers<kBytes, true>(given, x, x_stride, y);
        return run_integers<kBytes, false>(given, x, x_stride, y);
#endif
    }
    run_widened(given, x, x_stride, y);
}

}  // namespace

// Multiplies up to 64 rows of x, whose elements have unit stride, with a weight of 8 or 4 bits. Zero points and the bias
// may be null. A group has at most `width` elements.
extern "C" void weight_only_linear(const void* x, const void* weight, const void* scales, const void* zeros,
                                   const void* bias, void* y, int dtype, int scale_dtype, int zero_dtype, int wide_bias,
                                   int numbers, int64_t rows, int64_t width, int64_t out, int64_t group,
                                   int64_t x_stride) {
    const int64_t groups = (width + group - 1) / group;
    const WeightOnly given{static_cast<const uint8_t*>(weight), Factors{scales, scale_dtype, groups},
                           Factors{zeros, zero_dtype, groups}, bias, wide_bias, numbers, rows, width, out, group};
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        run(given, static_cast<const T*>(x), x_stride, static_cast<T*>(y));
    });
}

// Multiplies the rows of each expert, 64 at a time, as weight_only_linear. Returns 0, or 1 if the counts exceed the
// rows. All contiguous but the rows of x.
extern "C" int64_t weight_only_grouped_linear(const void* x, const void* weight, const void* scales, const void* zeros,
                                              const int64_t* counts, const void* bias, void* y, int dtype,
                                              int scale_dtype, int zero_dtype, int wide_bias, int numbers, int64_t rows,
                                              int64_t num_experts, int64_t width, int64_t out, int64_t group,
                                              int64_t x_stride) {
    int64_t left = rows;
    for (int64_t expert = 0; expert < num_experts; expert++) {
        if (counts[expert] < 0 || counts[expert] > left) return 1;
        left -= counts[expert];
    }
    const int64_t groups = (width + group - 1) / group;
    const Factors all_scales{scales, scale_dtype, groups}, all_zeros{zeros, zero_dtype, groups};
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        WeightOnly given{nullptr, all_scales, all_zeros, nullptr, wide_bias, numbers, 0, width, out, group};
        const T* from = static_cast<const T*>(x);
        T* to = static_cast<T*>(y);
        for (int64_t expert = 0; expert < num_experts; expert++) {
            const int64_t row = expert * out;
            given.weight = static_cast<const uint8_t*>(weight) + row * given.row_bytes();
            given.scales = all_scales.from(row), given.zeros = all_zeros.from(row);
            if (bias) given.bias = static_cast<const char*>(bias) + row * (wide_bias ? sizeof(float) : sizeof(T));
            for (int64_t count = counts[expert]; count > 0; count -= given.rows) {
                given.rows = std::min(count, kOthers);
                run(given, from, x_stride, to);
                from += given.rows * x_stride, to += given.rows * out;
            }
        }
    });
    return 0;
}

REPLAYABLE(weight_only_linear)
REPLAYABLE(weight_only_grouped_linear)
