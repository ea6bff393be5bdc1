// Projections of up to 64 rows, or of those of experts, with weights of 8 or 4 bits in groups, which are read in place.
//
// Where the processor multiplies integers, x is rounded to 16-bit ones, with a scale for each block of x. This is exact to
// 2**-15 of the block's largest element, which is less than bfloat16's rounding. A weight is then never widened further:
// a few rows of x are multiplied here; more with AVX512_VNNI in weight_only_columns.cpp, with AMX in weight_only_tiles.cpp.
// Otherwise some rows of a weight at a time are widened, in a core's cache: to float32, or where the processor multiplies
// pairs of bfloat16, to these.
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
        Multiplication<Operand<T>> multiplication;
        multiplication.pack_others(others, given.rows, given.width);
        Buffer<Operand<T>> rows(kBlock * given.width);
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
            multiplication.run(rows.data(), count, sums, rows.data());  // none to fetch: they were just made
            for (int64_t m = 0; m < given.rows; m++)
                for (int64_t i = 0; i < count; i++)
                    y[m * given.out + first + i] = T(sums[m * kBlock + i] + given.bias_of<T>(first + i));
        }
    }
}

#ifdef HAL_INTEGERS
#ifdef __AVX512VNNI__
constexpr int64_t kFew = 2, kMostRows = kFew;  // rows of x at a time; those up to which this is faster than columns
#else
constexpr int64_t kFew = 4, kMostRows = 16;  // or faster than widening
#endif
constexpr int64_t kAhead = 4096;  // bytes of the weight to prefetch ahead
// Into which cache: the second takes more lines at a time, the first is nearer. Measured; 3 is the first.
constexpr int kCache = kRegisters >= 32 ? 2 : 3;

// How a register holds packed elements: how many a 16-bit lane has, and how many all. As integers, they fill a word.
template <int Kind>
struct Packed {
    static constexpr int64_t kSplit = 16 / bits_of(Kind), kIn = kSplit * 2 * kLanes;
    using Word = std::conditional_t<kSplit == 2, uint32_t, uint64_t>;
};

// Rows of x as integers, in the order in which `unpack` gives those of the weight: in each register, elements 0, 2, 4...
// and 1, 3, 5... for weights of 8 bits; every fourth one for those of 4 bits.
struct Integers {
    int64_t blocks, groups;           // groups in whole vectors
    std::vector<int16_t> values;      // [rows][blocks][kBlockOfX]
    std::vector<float> scales, sums;  // [rows][blocks]; [rows][groups], of the elements of x
};

template <int Kind, class T>
void round(const WeightOnly& given, const T* x, int64_t stride, Integers& made) {
    using P = Packed<Kind>;
    const int64_t blocks = (given.width + kBlockOfX - 1) / kBlockOfX, groups = up(given.scales.groups, kLanes);
    made.blocks = blocks, made.groups = groups;
    made.values.resize(given.rows * blocks * kBlockOfX);
    made.scales.resize(given.rows * blocks), made.sums.assign(given.rows * groups, 0.0f);
    int16_t* to = made.values.data();
    for (int64_t row = 0; row < given.rows; row++)
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t first = block * kBlockOfX, count = std::min(kBlockOfX, given.width - first);
            int32_t q[kBlockOfX];
            const float scale = round_block(x + row * stride + first, count, q);
            made.scales[row * blocks + block] = scale;
            typename P::Word words[kBlockOfX / P::kSplit];
            int16_t narrow[kBlockOfX];
            std::copy_n(q, kBlockOfX, narrow);
            std::memcpy(words, narrow, sizeof(words));
            for (int64_t at = 0; at < kBlockOfX / P::kSplit; at += 2 * kLanes)
                for (int64_t part = 0; part < P::kSplit; part++, to += 2 * kLanes)
                    for (int64_t i = 0; i < 2 * kLanes; i++) to[i] = int16_t(words[at + i] >> 16 * part);
            add_to_groups(q, first, count, scale, given.group, made.sums.data() + row * groups, 1);
        }
}

// The scales of the lanes of a register of sums, from those of the groups of a row.
struct Spread {
    std::vector<int64_t> first;  // by register: the group of its first lane
    Ints of_lane;                // the further group of each lane

    // `together` elements are summed in a register.
    Spread(int64_t registers, int64_t together, int64_t group, int64_t groups) : first(registers) {
        for (int64_t i = 0; i < registers; i++) first[i] = std::min(i * together / group, groups - 1);
        const int64_t of_group = groups == 1 ? together : std::min(group, together);
        for (int lane = 0; lane < kLanes; lane++) of_lane[lane] = int32_t(lane * (together / kLanes) / of_group);
    }
    Lanes operator()(const float* scales, int64_t at) const {
        return Lanes(spread_four(scales + first[at], Register(of_lane)));
    }
};

// Widens a register of the weight to registers of 16-bit integers. Those of 4 bits become w + 8.
template <int Kind>
inline void unpack(Shorts packed, Shorts* to) {
    using Unsigned = uint16_t __attribute__((vector_size(sizeof(Shorts))));
    if constexpr (Kind == kBytes) {
        to[0] = packed << 8 >> 8, to[1] = packed >> 8;
    } else if constexpr (Kind == kFloat4) {
        for (int i = 0; i < 4; i++) to[i] = lookup(kTwice, packed >> 4 * i);
    } else {
        packed ^= int16_t(0x8888);
        to[0] = packed & 15, to[1] = packed >> 4 & 15, to[2] = packed >> 8 & 15, to[3] = Shorts(Unsigned(packed) >> 12);
    }
}

// Writes the sums of each lane of a row of the weight times `Rows` rows of x to held[m * kLanes]. Parts: of a block of x,
// each of which is summed as integers.
template <int Kind, int64_t Parts, int Rows>
inline void multiply(const WeightOnly& given, const Integers& x, int64_t row, const Spread& spread, const uint8_t* line,
                     const float* scales, Lanes* held) {
    using P = Packed<Kind>;
    constexpr int64_t kElements = kBlockOfX / Parts, kVectors = kElements / (2 * kLanes);
    constexpr int64_t kPart = kElements * bits_of(Kind) / 8;
    const int64_t bytes = given.row_bytes(), blocks = x.blocks;
    const int16_t* values = x.values.data() + row * blocks * kBlockOfX;
    const float* of_x = x.scales.data() + row * blocks;
    Lanes sums[Rows] = {};
    auto add = [&](int64_t block, const uint8_t* from, const uint8_t* ahead) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int64_t part = 0; part < Parts; part++) {
            Shorts weight[kVectors];
#pragma GCC unroll 8
            for (int64_t byte = 0; byte < kPart; byte += sizeof(Shorts)) {
                unpack<Kind>(load<Shorts>(from + part * kPart + byte), weight + byte / sizeof(Shorts) * P::kSplit);
                if ((part * kPart + byte) % 64 == 0) __builtin_prefetch(ahead + part * kPart + byte, 0, kCache);
            }
            const Lanes scale = spread(scales, block * Parts + part);
#pragma GCC unroll 4
            for (int m = 0; m < Rows; m++) {
                const int16_t* of_row = values + (m * blocks + block) * kBlockOfX + part * kElements;
                Ints sum = {};
#pragma GCC unroll 8
                for (int i = 0; i < kVectors; i++) sum = dot(sum, weight[i], load<Shorts>(of_row + i * 2 * kLanes));
                Lanes factor = scale * of_x[m * blocks + block];
                keep(factor);
                sums[m] += __builtin_convertvector(sum, Lanes) * factor;
            }
        }
    };
    constexpr int64_t kBlockBytes = Parts * kPart;
    const int64_t whole = given.width / kBlockOfX;
    for (int64_t block = 0; block < whole; block++) {
        const uint8_t* from = line + block * kBlockBytes;
        add(block, from, from + kAhead);
    }
    if (whole < blocks) {
        uint8_t last[kBlockBytes] = {};
        std::copy_n(line + whole * kBlockBytes, bytes - whole * kBlockBytes, last);
        add(whole, last, line + whole * kBlockBytes);
    }
    for (int m = 0; m < Rows; m++) held[m * kLanes] = sums[m];
}

// Multiplies `count` rows of the weight from `begin` on with `Rows` rows of x from `row` on.
template <int Kind, int64_t Parts, int Rows, class T>
__attribute__((noinline)) void multiply_unit(const WeightOnly& given, const Integers& x, int64_t row,
                                             const Spread& spread, int64_t begin, int64_t count, float* scales,
                                             float* zeros, T* y) {
    constexpr float kOffset = Kind == kNibbles ? 8 : 0;
    const bool corrected = Kind == kNibbles || given.zeros.values;
    Lanes held[Rows * kLanes] = {};
    for (int64_t r = 0; r < count; r++) {
        given.scales.read(begin + r, scales);
        multiply<Kind, Parts, Rows>(given, x, row, spread, given.weight + (begin + r) * given.row_bytes(), scales,
                                    held + r);
        if (!corrected) continue;
        if (given.zeros.values) given.zeros.read(begin + r, zeros);
        for (int64_t group = 0; group < x.groups; group += kLanes) {
            Lanes less = load<Lanes>(scales + group) * (load<Lanes>(zeros + group) + kOffset);
            keep(less);  // or the compiler would multiply in another order for one row than for several
            for (int m = 0; m < Rows; m++) {
                Lanes product = load<Lanes>(x.sums.data() + (row + m) * x.groups + group) * less;
                keep(product);
                held[m * kLanes + r] -= product;
            }
        }
    }
    for (int m = 0; m < Rows; m++) {
        const Lanes sums = sums_of(held + m * kLanes);
        for (int64_t i = 0; i < count; i++)
            y[(row + m) * given.out + begin + i] = T(sums[i] + given.bias_of<T>(begin + i));
    }
}

template <int Kind, int64_t Parts, int Rows = kFew, class... Arguments>
void multiply_rows(const WeightOnly& given, const Integers& x, int64_t row, Arguments&... arguments) {
    if constexpr (Rows > 1)
        if (given.rows - row < Rows) return multiply_rows<Kind, Parts, Rows - 1>(given, x, row, arguments...);
    multiply_unit<Kind, Parts, Rows>(given, x, row, arguments...);
}

template <int Kind, int64_t Parts, class T>
void run_integers(const WeightOnly& given, const T* from, int64_t stride, T* y) {
    thread_local Integers rounded;
    round<Kind>(given, from, stride, rounded);
    const Integers& x = rounded;  // the threads share this one's
    const Spread spread(x.blocks * Parts, kBlockOfX / Parts, given.group, given.scales.groups);
    const bool parallel = given.out * given.width > kSerial;
    Claims claims((given.out + kLanes - 1) / kLanes, parallel ? omp_get_max_threads() : 1);
#pragma omp parallel if (parallel)
    {
        std::vector<float> of_scales(x.groups + 3), of_zeros(x.groups);  // Spread reads four at a time
        float *scales = of_scales.data(), *zeros = of_zeros.data();
        claims.run([&](int64_t unit, int64_t) {
            const int64_t begin = unit * kLanes, count = std::min<int64_t>(kLanes, given.out - begin);
            for (int64_t row = 0; row < given.rows; row += kFew)
                multiply_rows<Kind, Parts>(given, x, row, spread, begin, count, scales, zeros, y);
        });
    }
}

// Chooses the largest part of a block of x, of a register's elements at least, whose lanes have one scale each.
template <int Kind, int64_t Parts = 1, class... Arguments>
void run_parts(const WeightOnly& given, Arguments... arguments) {
    if constexpr (kBlockOfX / Parts > Packed<Kind>::kIn)
        if (given.group < std::min(given.width, kBlockOfX / Parts))
            return run_parts<Kind, 2 * Parts>(given, arguments...);
    run_integers<Kind, Parts>(given, arguments...);
}
#endif

template <class T>
void run(const WeightOnly& given, const T* x, int64_t x_stride, T* y) {
    if constexpr (sizeof(T) == 2) {
        if (!spreads(given.width, given.group, given.numbers)) return run_widened(given, x, x_stride, y);
        if (given.rows >= kFewestForTiles && multiply_tiles(given, x, x_stride, y)) return;
#ifdef __AVX512VNNI__
        if (given.rows > kFew) return multiply_columns(given, x, x_stride, y);
#endif
#ifdef HAL_INTEGERS
        if (given.rows <= kMostRows) {
            if (given.numbers == kNibbles) return run_parts<kNibbles>(given, x, x_stride, y);
            if (given.numbers == kFloat4) return run_parts<kFloat4>(given, x, x_stride, y);
            return run_parts<kBytes>(given, x, x_stride, y);
        }
#endif
    }
    run_widened(given, x, x_stride, y);
}

}  // namespace

// Returns up to how many rows of 16-bit elements are multiplied as integers.
extern "C" int64_t integer_rows() {
#if defined(__AVX512VNNI__)
    return kOthers;
#elif defined(HAL_INTEGERS)
    return kMostRows;
#else
    return 0;
#endif
}

// Returns up to how many rows are all multiplied in the same way, whatever their number.
extern "C" int64_t rows_alike() {
#ifdef HAL_INTEGERS
    return kMostRows;
#else
    return kOthers;
#endif
}

// Multiplies rows of x, whose elements have unit stride, with a weight of 8 or 4 bits, up to 64 at a time. Zero points
// and the bias may be null. A group has at most `width` elements.
extern "C" void weight_only_linear(const void* x, const void* weight, const void* scales, const void* zeros,
                                   const void* bias, void* y, int dtype, int scale_dtype, int zero_dtype, int wide_bias,
                                   int numbers, int64_t rows, int64_t width, int64_t out, int64_t group,
                                   int64_t x_stride) {
    const int64_t groups = (width + group - 1) / group;
    WeightOnly given{static_cast<const uint8_t*>(weight), Factors{scales, scale_dtype, groups},
                     Factors{zeros, zero_dtype, groups}, bias, wide_bias, numbers, 0, width, out, group};
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        const T* from = static_cast<const T*>(x);
        T* to = static_cast<T*>(y);
        int64_t parts = (rows + kOthers - 1) / kOthers;  // of about as many rows each
        for (int64_t left = rows; left > 0; left -= given.rows) {
            given.rows = (left + parts - 1) / parts--;
            run(given, from, x_stride, to);
            from += given.rows * x_stride, to += given.rows * out;
        }
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
