// The draw of a token from each row of logits. The result depends on the row alone.
//
// `scaled` is (logit - largest logit) / temperature, which is at most 0. A token's weight is e**scaled. The token with
// the lowest exponential / weight is drawn, so weights are neither normalized nor ranked unless top_k or top_p is set.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "elements.h"
#include "products.h"
#include "replay.h"

// In pointwise.cpp.
extern "C" void greedy_sample(const void* logits, int64_t* tokens, int dtype, int64_t count, int64_t width,
                              int64_t stride);

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kGrain = 1 << 15;  // elements; for fewer, starting threads costs more than it gains
constexpr int64_t kChunk = 1024;     // tokens that are scaled at a time
constexpr int64_t kPiece = 64;       // tokens that are skipped at a time; compilers vectorize loops of this length

// The 32-bit finalizer of MurmurHash3.
inline uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

// Returns a uniform number in (0, 1] that depends on the state and the token.
inline float uniform(uint32_t state, uint32_t token) {
    return (float(mix(mix(state ^ token) ^ 0x9E3779B9u)) + 0.5f) * 0x1p-32f;
}

// Returns 0.999 to 1.07 times e**x for x <= 0, or the smallest normal number if that is greater. The bits of a float32
// interpolate linearly between powers of 2, and the line is above the curve.
inline float above_exponential(float x) {
    float nearly = x * 12102203.0f + 1065353216.0f;  // 2**23 / ln 2, and the bits of 1
    const int32_t bits = int32_t(nearly > 8388608.0f ? nearly : 8388608.0f);
    float above;
    std::memcpy(&above, &bits, 4);
    return above;
}

// Returns whether any of kPiece numbers is above `low` and at most `high`.
inline bool any_between(const float* piece, float low, float high) {
    int32_t found = 0;
    for (int64_t i = 0; i < kPiece; i++) found |= (piece[i] > low) & (piece[i] <= high);
    return found;
}

// Returns a number below 2**63 that orders tokens: greater for a greater `scaled`, then for the lower token.
inline uint64_t ranking(float scaled, uint32_t token) {
    uint32_t bits;
    std::memcpy(&bits, &scaled, 4);
    return uint64_t(~(bits | 0x80000000)) << 32 | uint32_t(~token);
}

inline uint32_t token_of(uint64_t ranking) { return ~uint32_t(ranking); }

inline float scaled_of(uint64_t ranking) {
    const uint32_t bits = ~uint32_t(ranking >> 32) | 0x80000000;
    float scaled;
    std::memcpy(&scaled, &bits, 4);
    return scaled;
}

// The token with the lowest exponential / weight of those offered. The constructor takes the most likely token, which
// no filter removes.
class Choice {
  public:
    Choice(uint32_t state, uint32_t first, float min_p)
        : state_(state), min_p_(min_p), token_(first), scaled_(0), lowest_(-std::log1p(-uniform(state, first))) {
        if (min_p > 0) floor_ = std::log(min_p) - 1e-3f;  // compare() tests the weight itself
    }

    // Keeps only tokens whose rankings are at least this.
    void limit(uint64_t ranking) {
        last_ = ranking;
        floor_ = std::max(floor_, scaled_of(ranking));
    }

    // Offers tokens from `first` on. `scaled` is padded to a multiple of kPiece.
    void offer(const float* scaled, int64_t count, uint32_t first) {
        for (int64_t piece = 0; piece < count; piece += kPiece) {
            const float bound = this->bound(), floor = floor_;
            float drawn[kPiece];
            int32_t near = 0;
            for (int64_t i = 0; i < kPiece; i++) {
                const float value = scaled[piece + i];
                drawn[i] = uniform(state_, first + uint32_t(piece + i));
                near |= (drawn[i] < above_exponential(value) * bound) & (value >= floor);
            }
            if (!near) continue;
            for (int64_t i = 0; i < std::min(kPiece, count - piece); i++)
                compare(drawn[i], scaled[piece + i], first + uint32_t(piece + i));
        }
    }

    void offer(uint64_t ranking) { compare(uniform(state_, token_of(ranking)), scaled_of(ranking), token_of(ranking)); }

    int64_t token() const { return token_; }

  private:
    // An exponential, -log1p(-u), is at least u. A token whose u is at least its weight times this cannot be the
    // lowest, which spares nearly all tokens the logarithm. The margin covers rounding.
    float bound() const { return lowest_ * 1.01f; }

    void compare(float drawn, float scaled, uint32_t token) {
        if (!(scaled >= floor_) || ranking(scaled, token) < last_) return;
        const float weight = std::exp(scaled);
        if (!(drawn < weight * bound()) || weight < min_p_) return;
        const float found = -std::log1p(-drawn) / weight;
        const bool ahead = found == lowest_ && ranking(scaled, token) > ranking(scaled_, token_);
        if (found < lowest_ || ahead) lowest_ = found, scaled_ = scaled, token_ = token;
    }

    uint32_t state_;
    float min_p_;
    float floor_ = -std::numeric_limits<float>::max();  // of `scaled`: tokens of logit -inf are below
    uint64_t last_ = 0;
    uint32_t token_;
    float scaled_, lowest_;
};

// A row of logits, scaled when read.
template <class T>
struct Scaled {
    const T* logits;
    int64_t width;
    float top, temperature;

    // Writes up to kChunk numbers from `first` on, padded with -inf to a multiple of kPiece. Returns their number
    // without the padding.
    int64_t read(int64_t first, float* to) const {
        const int64_t count = std::min(kChunk, width - first), whole = count / kLanes * kLanes;
        for (int64_t i = 0; i < whole; i += kLanes) {
            const Lanes values = (wide(logits + first + i) - top) / temperature;
            std::memcpy(to + i, &values, sizeof(values));
        }
        for (int64_t i = whole; i < count; i++) to[i] = (float(logits[first + i]) - top) / temperature;
        for (int64_t i = count; i % kPiece; i++) to[i] = -kInfinity;
        return count;
    }
};

// Keeps the k greatest rankings, in any order.
void keep(std::vector<uint64_t>& rankings, int64_t k) {
    if (int64_t(rankings.size()) <= k) return;
    std::nth_element(rankings.begin(), rankings.begin() + (k - 1), rankings.end(), std::greater<>());
    rankings.resize(k);
}

// Collects the rankings of the k most likely tokens, without tokens of logit -inf.
template <class T>
void most_likely(const Scaled<T>& row, int64_t k, std::vector<uint64_t>& rankings) {
    rankings.clear();
    float floor = -kInfinity;  // what later tokens must exceed
    float scaled[kChunk];
    for (int64_t first = 0; first < row.width; first += kChunk) {
        const int64_t count = row.read(first, scaled);
        for (int64_t i = 0; i < count; i += kPiece) {
            if (!any_between(scaled + i, floor, 0)) continue;
            for (int64_t at = i; at < std::min(count, i + kPiece); at++)
                if (scaled[at] > floor) rankings.push_back(ranking(scaled[at], uint32_t(first + at)));
            if (int64_t(rankings.size()) < 2 * k + 64) continue;
            keep(rankings, k);
            floor = scaled_of(rankings[k - 1]);
        }
    }
    keep(rankings, k);
}

double weight_of(const uint64_t* rankings, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += exponential(scaled_of(rankings[i]));
    return sum;
}

// Returns the last ranking that top_p keeps of these, which follow tokens of the weight `before`, or a greater one than
// all if it keeps none. `total` is the weight of all tokens.
//
// Like the reference, it rounds probabilities to float32, sums them in float64, as torch.cumsum does, and rounds the
// sum. The softmax rounds differently, so a sum may differ from the reference's by about 1e-6. At the limit, tokens of
// this probability may be kept by one and not by the other.
uint64_t last_of(std::vector<uint64_t>& rankings, double before, double total, float top_p) {
    uint64_t *first = rankings.data(), *end = first + rankings.size();
    while (end - first > 64) {
        uint64_t* middle = first + (end - first) / 2;
        std::nth_element(first, middle, end, std::greater<>());
        const double half = weight_of(first, middle - first);
        if ((before + half) / total < top_p)
            before += half, first = middle;
        else
            end = middle;
    }
    std::sort(first, end, std::greater<>());
    uint64_t last = *first + 1;  // at most the ranking of each kept so far
    double sum = before / total;
    for (; first < end; last = *first++) {
        const float probability = float(exponential(scaled_of(*first)) / total);
        sum += probability;
        if (!(float(sum) - probability < top_p)) break;
    }
    return last;
}

constexpr int kBuckets = 2048, kPerUnit = 64;  // of `scaled`; the last bucket holds all below -32

inline int bucket(float scaled) {
    const float at = scaled * -float(kPerUnit);
    return at < float(kBuckets - 1) ? int(at) : kBuckets - 1;
}

// Returns the last ranking that top_p keeps of all tokens. It ranks only the bucket in which the sum reaches top_p.
// `scaled` is padded with -inf to a multiple of kPiece.
uint64_t last_of_all(const float* scaled, int64_t width, float top_p, std::vector<uint64_t>& rankings) {
    double sums[kBuckets] = {};
    for (int64_t i = 0; i < width; i += kPiece) {
        float weights[kPiece], sum = 0;
        int buckets[kPiece];
        for (int64_t at = 0; at < kPiece; at++) weights[at] = exponential(scaled[i + at]);
        if (any_between(scaled + i, -float(kBuckets - 1) / kPerUnit, 0)) {
            for (int64_t at = 0; at < kPiece; at++) buckets[at] = bucket(scaled[i + at]);
            for (int64_t at = 0; at < kPiece; at++) sums[buckets[at]] += weights[at];
        } else {
            for (int64_t at = 0; at < kPiece; at++) sum += weights[at];
            sums[kBuckets - 1] += sum;
        }
    }
    double total = 0, before = 0;
    for (double sum : sums) total += sum;
    int at = 0;
    while (at < kBuckets - 1 && (before + sums[at]) / total < top_p) before += sums[at++];
    rankings.clear();
    const float high = -float(at) / kPerUnit, low = at < kBuckets - 1 ? -float(at + 1) / kPerUnit : -kInfinity;
    for (int64_t i = 0; i < width; i += kPiece) {
        if (!any_between(scaled + i, low, high)) continue;
        for (int64_t token = i; token < std::min(width, i + kPiece); token++)
            if (scaled[token] <= high && scaled[token] > low) rankings.push_back(ranking(scaled[token], token));
    }
    return rankings.empty() ? 0 : last_of(rankings, before, total, top_p);
}

// Returns the token of a row whose most likely token is `first`. A row whose largest logit is not finite has no
// probabilities. Its token is the reference's: 0 for NaN, and the first of the largest for an infinity.
template <class T>
int64_t token_of_row(const T* logits, int64_t width, int64_t first, float temperature, int64_t top_k, float top_p,
                     float min_p, uint64_t seed, uint64_t step) {
    thread_local std::vector<uint64_t> rankings;
    thread_local std::vector<float> held;
    const float top = logits[first];
    if (top != top) return 0;
    if (temperature <= 0 || std::fabs(top) == kInfinity) return first;
    const uint32_t state = mix(mix(mix(uint32_t(seed)) ^ uint32_t(seed >> 32)) ^ uint32_t(step));
    Choice choice(state, uint32_t(first), min_p);
    const Scaled<T> row{logits, width, top, temperature};
    const bool ranked = top_k > 0 && top_k < width, summed = !(top_p >= 1);
    if (ranked) {
        most_likely(row, top_k, rankings);
        if (summed && !rankings.empty())
            choice.limit(last_of(rankings, 0, weight_of(rankings.data(), rankings.size()), top_p));
        for (uint64_t each : rankings) choice.offer(each);
    } else if (summed) {
        held.resize((width + kChunk - 1) / kChunk * kChunk);
        for (int64_t at = 0; at < width; at += kChunk) row.read(at, held.data() + at);
        choice.limit(last_of_all(held.data(), width, top_p, rankings));
        choice.offer(held.data(), width, 0);
    } else {
        float scaled[kChunk];
        for (int64_t at = 0; at < width; at += kChunk) choice.offer(scaled, row.read(at, scaled), uint32_t(at));
    }
    return choice.token();
}

}  // namespace

// Logits have unit stride in a row; the others are contiguous.
extern "C" void sample(const void* logits, const float* temperature, const int32_t* top_k, const float* top_p,
                       const float* min_p, const int64_t* seed, const int64_t* step, int64_t* tokens, int dtype,
                       int64_t count, int64_t width, int64_t stride) {
    greedy_sample(logits, tokens, dtype, count, width, stride);
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for schedule(dynamic) if (count * width > kGrain)
        for (int64_t row = 0; row < count; row++)
            tokens[row] =
                token_of_row(static_cast<const T*>(logits) + row * stride, width, tokens[row], temperature[row],
                             top_k[row], top_p[row], min_p[row], uint64_t(seed[row]), uint64_t(step[row]));
    });
}

REPLAYABLE(sample)
