// The products of weight_only.cpp by AVX-512's products of bytes, of more than a few rows of x: up to 8 at a time with 16
// rows of the weight, a lane each.
//
// A block of these rows is transposed in a core's first cache, so that a register has a column: four elements, or eight of
// 4 bits, of each row. It is multiplied with four elements of x, repeated, which takes less memory traffic than whole
// registers of x. An element of x is an integer of 16 bits, as there, in two halves: q = 256 high + low. The weight is
// taken as w + kOffset, which is not negative; sums start with minus what this adds.
#include <omp.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "claims.h"
#include "panels.h"
#include "weight_only.h"

#ifdef __AVX512VNNI__
namespace {

constexpr int kMostRows = 8;                   // of x at a time
constexpr int64_t kSerialElements = 1 << 14;  // of x, up to which starting threads costs more than it gains

template <int Kind>
struct Columns {
    static constexpr int64_t kOffset = Kind == kBytes ? 128 : Kind == kFloat4 ? 12 : 8;
    static constexpr int64_t kOf = Kind == kBytes ? 4 : 8;      // elements of a row in a column
    static constexpr int64_t kInBlock = kBlockOfX / kOf;        // columns of a block
    static constexpr int64_t kBlockBytes = kBlockOfX * bits_of(Kind) / 8;
    static constexpr int64_t kWords = kOf / 2;                  // of x for a column: halves of four elements
};

// Up to kMostRows rows of x, by turns. A span is what is summed as integers: a block, or a group if smaller.
struct Rows {
    int64_t count;
    std::vector<int32_t> words, starts;  // [columns][count][kWords]; [spans][count]: -kOffset times the sum of a span
    std::vector<float> scales, sums;     // [blocks][count]; [groups][count], of the elements of x
};

// Writes the words of a block of a row of x, `apart` from column to column.
template <int Kind>
inline void write_words(const int32_t* q, int32_t* to, int64_t apart) {
    using C = Columns<Kind>;
    const __m128i turns = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    for (int64_t i = 0; i < kBlockOfX; i += kLanes) {
        const __m512i values = load<__m512i>(q + i), halves = _mm512_add_epi32(values, _mm512_set1_epi32(128));
        __m128i high = _mm512_maskz_cvtepi32_epi8(0xffff, _mm512_srai_epi32(halves, 8));
        __m128i low = _mm512_maskz_cvtepi32_epi8(0xffff, values);
        if constexpr (Kind != kBytes)  // even elements of a column are in the lower half of its bytes
            high = _mm_shuffle_epi8(high, turns), low = _mm_shuffle_epi8(low, turns);
        const __m128i words[2] = {_mm_unpacklo_epi32(high, low), _mm_unpackhi_epi32(high, low)};
        const int32_t* from = reinterpret_cast<const int32_t*>(words);
        for (int64_t column = 0; column < kLanes / C::kOf; column++)
            std::memcpy(to + (i / C::kOf + column) * apart, from + column * C::kWords, 4 * C::kWords);
    }
}

template <int Kind>
void allocate(const WeightOnly& given, int64_t count, int64_t span, Rows& rows) {
    using C = Columns<Kind>;
    const int64_t blocks = (given.width + kBlockOfX - 1) / kBlockOfX;
    rows.count = count;
    rows.words.resize(blocks * C::kInBlock * count * C::kWords);
    rows.starts.resize(blocks * (kBlockOfX / span) * count);
    rows.scales.resize(blocks * count), rows.sums.assign(given.scales.groups * count, 0.0f);
}

// Rounds a row of x.
template <int Kind, class T>
void round(const WeightOnly& given, const T* x, int64_t row, int64_t span, Rows& rows) {
    using C = Columns<Kind>;
    const int64_t count = rows.count;
    for (int64_t first = 0, block = 0; first < given.width; first += kBlockOfX, block++) {
        const int64_t taken = std::min(kBlockOfX, given.width - first);
        int32_t q[kBlockOfX];
        const float scale = round_block(x + first, taken, q);
        rows.scales[block * count + row] = scale;
        if (given.zeros.values) add_to_groups(q, first, taken, scale, given.group, rows.sums.data() + row, count);
        for (int64_t i = 0; i < kBlockOfX; i += span) {
            __m512i sum = _mm512_setzero_si512();
            for (int64_t j = i; j < i + span; j += kLanes) sum = _mm512_add_epi32(sum, load<__m512i>(q + j));
            rows.starts[(first + i) / span * count + row] = int32_t(-C::kOffset * _mm512_reduce_add_epi32(sum));
        }
        write_words<Kind>(q, rows.words.data() + (block * C::kInBlock * count + row) * C::kWords, count * C::kWords);
    }
}

// Writes w + kOffset of a column: four elements of each row, and the other four.
template <int Kind>
inline void unpack(__m512i column, __m512i* to) {
    if constexpr (Kind == kBytes) {
        *to = _mm512_xor_si512(column, _mm512_set1_epi8(int8_t(0x80)));
        return;
    }
    const __m512i nibble = _mm512_set1_epi8(15);
    if constexpr (Kind == kNibbles) column = _mm512_xor_si512(column, _mm512_set1_epi8(int8_t(0x88)));
    to[0] = _mm512_and_si512(column, nibble), to[1] = _mm512_and_si512(_mm512_srli_epi16(column, 4), nibble);
    if constexpr (Kind == kFloat4) {
        const __m512i table =
            _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
        to[0] = _mm512_shuffle_epi8(table, to[0]), to[1] = _mm512_shuffle_epi8(table, to[1]);
    }
}

// Writes the columns of a block of kLanes rows of the weight that are `stride` bytes apart, and of which `bytes` follow.
template <int Kind>
inline void transpose(const uint8_t* rows, int64_t stride, int64_t bytes, __m512i* columns) {
    for (int64_t at = 0; at < Columns<Kind>::kBlockBytes; at += 64) {
        const int64_t left = std::clamp<int64_t>(bytes - at, 0, 64);
        const __mmask64 there = left == 64 ? ~__mmask64(0) : (__mmask64(1) << left) - 1;
        Lanes block[kLanes];
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; r++) {
            const uint8_t* from = rows + r * stride + at;
            block[r] = Lanes(_mm512_maskz_loadu_epi8(there, from));
        }
        ::transpose(block);
        std::memcpy(columns + at / 4, block, sizeof(block));
    }
}

// The lines of memory to fetch, one for each column: 16 that are `apart` bytes from one another, and the `further` ones.
struct Ahead {
    const uint8_t* from;
    int64_t apart, further;

    void fetch(int64_t column) const {
        __builtin_prefetch(from + column % kLanes * apart + column / kLanes * further);
    }
};

// sums[m] += the products of the spans of a block, of `count` columns each, with rows of x, of which there are M, times
// their scales.
template <int Kind, int M>
void multiply(const __m512i* columns, int64_t spans, int64_t count, const float* scales, const int32_t* x,
              const int32_t* starts, const float* of_x, Ahead ahead, Lanes* sums) {
    constexpr int64_t kWords = Columns<Kind>::kWords;
    for (int64_t column = 0; column < spans * count; starts += M, scales += kLanes) {
        __m512i high[M], low[M];
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) high[m] = _mm512_setzero_si512(), low[m] = _mm512_set1_epi32(starts[m]);
        for (const int64_t end = column + count; column < end; column++, x += M * kWords) {
            ahead.fetch(column);
            __m512i numbers[2];
            unpack<Kind>(load<__m512i>(columns + column), numbers);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++)
#pragma GCC unroll 2
                for (int word = 0; word < kWords; word += 2) {
                    const int32_t* of_row = x + m * kWords + word;
                    high[m] = _mm512_dpbusd_epi32(high[m], numbers[word / 2], _mm512_set1_epi32(of_row[0]));
                    low[m] = _mm512_dpbusd_epi32(low[m], numbers[word / 2], _mm512_set1_epi32(of_row[1]));
                }
        }
        const Lanes scale = load<Lanes>(scales);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[m], 8), low[m]);
            sums[m] += Lanes(_mm512_cvtepi32_ps(sum)) * (scale * of_x[m]);
        }
    }
}

template <int Kind, int M = kMostRows, class... Arguments>
void multiply_rows(int64_t rows, Arguments... given) {
    if constexpr (M > 1)
        if (rows < M) return multiply_rows<Kind, M - 1>(rows, given...);
    multiply<Kind, M>(given...);
}

// Returns up to kLanes elements in float32, and 0 for the others.
template <class T>
inline Lanes some(const T* from, int64_t count) {
    const __mmask16 there = count < kLanes ? (1u << count) - 1 : 0xffff;
    if constexpr (sizeof(T) == 4) return Lanes(_mm512_maskz_loadu_ps(there, from));
    T values[kLanes];
    if constexpr (sizeof(T) == 2)
        _mm256_storeu_epi16(values, _mm256_maskz_loadu_epi16(there, from));
    else
        _mm_storeu_epi8(values, _mm_maskz_loadu_epi8(there, from));
    return wide(values);
}

// Writes the factors of up to kLanes rows of the weight, a lane each: [groups][kLanes].
template <class T>
void write_lanes(const T* from, int64_t groups, int64_t count, float* to) {
    for (int64_t group = 0; group < groups; group += kLanes, to += kLanes * kLanes) {
        Lanes block[kLanes] = {};
        for (int64_t i = 0; i < count; i++) block[i] = some(from + i * groups + group, groups - group);
        ::transpose(block);
        std::memcpy(to, block, sizeof(block));
    }
}

void write_lanes(const Factors& factors, int64_t first, int64_t count, std::vector<float>& to) {
    const int64_t groups = factors.groups;
    const void* values = factors.from(first).values;
    to.resize(up(groups, kLanes) * kLanes);
    if (factors.dtype == Factors::kInt8)
        return write_lanes(static_cast<const int8_t*>(values), groups, count, to.data());
    if (factors.dtype >= Factors::kExponent) {
        std::vector<float> rows(count * groups);
        for (int64_t i = 0; i < count; i++) factors.read(first + i, rows.data() + i * groups);
        return write_lanes(rows.data(), groups, count, to.data());
    }
    with_type(factors.dtype, [&](auto type) {
        write_lanes(static_cast<const decltype(type)*>(values), groups, count, to.data());
    });
}

// Fetches the factors of kLanes rows from `first` on. Inlined, for compilers omit calls that do nothing else.
__attribute__((always_inline)) inline void fetch(const Factors& factors, int64_t first) {
    if (!factors.values) return;
    const char* end = static_cast<const char*>(factors.from(first + kLanes).values);
    for (const char* at = static_cast<const char*>(factors.from(first).values); at < end; at += 64) __builtin_prefetch(at);
}

// A product, whose units of kLanes rows of the weight threads take.
template <int Kind, class T>
class Units {
    using C = Columns<Kind>;

  public:
    Units(const WeightOnly& given, const std::vector<Rows>& x, int64_t span, T* y)
        : given(given), x(x), span(span), bytes(given.row_bytes()), groups(given.scales.groups), y(y) {}

    // Multiplies a unit, and fetches the one that follows.
    void run(int64_t unit, int64_t following) {
        const int64_t first = unit * kLanes, taken = std::min<int64_t>(kLanes, given.out - first);
        fetch(given.scales, following * kLanes), fetch(given.zeros, following * kLanes);
        write_lanes(given.scales, first, taken, scales);
        const uint8_t *rows = given.weight + first * bytes, *next = given.weight + following * kLanes * bytes;
        if (taken < kLanes) {
            whole.assign(kLanes * bytes, 0);
            std::copy_n(rows, taken * bytes, whole.data());
            rows = whole.data();
        }
        Lanes sums[kOthers];
        std::fill_n(sums, given.rows, Lanes{});
        const int64_t blocks = (given.width + kBlockOfX - 1) / kBlockOfX;
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t begin = block * kBlockOfX, left = std::min(kBlockOfX, given.width - begin);
            __m512i columns[C::kInBlock];
            transpose<Kind>(rows + block * C::kBlockBytes, bytes, bytes - block * C::kBlockBytes, columns);
            Ahead ahead = ahead_of(block, blocks, rows, next);
            for (size_t part = 0; part < x.size(); part++, ahead.apart = ahead.further = 0) {
                const Rows& of = x[part];
                multiply_rows<Kind>(of.count, columns, (left + span - 1) / span, span / C::kOf,
                                    scales.data() + begin / given.group * kLanes,
                                    of.words.data() + block * C::kInBlock * of.count * C::kWords,
                                    of.starts.data() + begin / span * of.count, of.scales.data() + block * of.count, ahead,
                                    sums + part * kMostRows);
            }
        }
        if (given.zeros.values) subtract_zeros(first, taken, sums);
        write(first, taken, sums);
    }

  private:
    // The following unit in the order of memory; if it is too large for a core's first cache, some blocks of a row ahead.
    Ahead ahead_of(int64_t block, int64_t blocks, const uint8_t* rows, const uint8_t* next) const {
        constexpr int64_t kNear = 24 << 10, kDistance = 8;
        const int64_t target = block + kDistance;
        if (kLanes * bytes <= kNear) return {next + block * kLanes * C::kBlockBytes, 64, kLanes * 64};
        return {target < blocks ? rows + target * C::kBlockBytes : next + (target - blocks) * C::kBlockBytes, bytes, 64};
    }

    void subtract_zeros(int64_t first, int64_t taken, Lanes* sums) {
        write_lanes(given.zeros, first, taken, zeros);
        for (int64_t group = 0; group < groups; group++) {
            const Lanes less = load<Lanes>(scales.data() + group * kLanes) * load<Lanes>(zeros.data() + group * kLanes);
            for (int64_t m = 0; m < given.rows; m++) {
                const Rows& of = x[m / kMostRows];
                sums[m] -= less * of.sums[group * of.count + m % kMostRows];
            }
        }
    }

    void write(int64_t first, int64_t taken, const Lanes* sums) {
        Lanes biases = {};
        for (int64_t i = 0; i < taken && given.bias; i++) biases[i] = given.bias_of<T>(first + i);
        for (int64_t m = 0; m < given.rows; m++) {
            T* to = y + m * given.out + first;
            if (taken == kLanes) {
                narrow(sums[m] + biases, to);
            } else {
                T values[kLanes];
                narrow(sums[m] + biases, values);
                std::copy_n(values, taken, to);
            }
        }
    }

    const WeightOnly& given;
    const std::vector<Rows>& x;
    const int64_t span, bytes, groups;
    T* y;
    std::vector<float> scales, zeros;
    std::vector<uint8_t> whole;
};

template <int Kind, class T>
void run(const WeightOnly& given, const T* from, int64_t stride, T* y) {
    const int64_t span = given.group >= given.width ? kBlockOfX : std::min(kBlockOfX, given.group);
    thread_local std::vector<Rows> rounded;
    rounded.resize((given.rows + kMostRows - 1) / kMostRows);
    std::vector<Rows>& x = rounded;  // the threads share this one's
    for (int64_t row = 0; row < given.rows; row += kMostRows)
        allocate<Kind>(given, std::min<int64_t>(kMostRows, given.rows - row), span, x[row / kMostRows]);
#pragma omp parallel for if (given.rows * given.width > kSerialElements)
    for (int64_t row = 0; row < given.rows; row++)
        round<Kind>(given, from + row * stride, row % kMostRows, span, x[row / kMostRows]);
    const bool parallel = given.out * given.width > kSerial;
    Claims claims((given.out + kLanes - 1) / kLanes, parallel ? omp_get_max_threads() : 1);
#pragma omp parallel if (parallel)
    {
        Units<Kind, T> units(given, x, span, y);
        claims.run([&](int64_t unit, int64_t following) { units.run(unit, following); });
    }
}

}  // namespace

template <class T>
void multiply_columns(const WeightOnly& given, const T* x, int64_t stride, T* y) {
    if (given.numbers == kNibbles) return run<kNibbles>(given, x, stride, y);
    if (given.numbers == kFloat4) return run<kFloat4>(given, x, stride, y);
    run<kBytes>(given, x, stride, y);
}

template void multiply_columns(const WeightOnly&, const bfloat16*, int64_t, bfloat16*);
template void multiply_columns(const WeightOnly&, const float16*, int64_t, float16*);
#endif
