// Random numbers. Each operation has two forms, with seed and offset as numbers and, for graphs, as tensors.
#include <cmath>
#include <limits>

#include "numeric.h"
#include "philox.h"

DOCUMENTED("ops-math: random (the page of each operation)");

namespace emulator {

double Philox::normal(uint64_t index) const {  // Box-Muller transform
    auto words = (*this)(index);
    double radius = std::sqrt(-2 * std::log((words[0] + 1.0) / 4294967296.0));
    return radius * std::cos(2 * M_PI * (words[1] / 4294967296.0));
}

}  // namespace emulator

using namespace emulator;

// Returns the significand bits of a dtype. More random bits would round up to the end of the interval.
static int significand_bits(at::ScalarType dtype) {
    return dtype == at::kDouble     ? 53
           : dtype == at::kFloat    ? 24
           : dtype == at::kHalf     ? 11
           : dtype == at::kBFloat16 ? 8
                                    : 31;
}

static void uniform(const Out& self, double from, double to, const Philox& numbers) {
    int bits = significand_bits(self.dtype());
    self.set(drawn<double>(self.sizes(), [&](int64_t i) { return from + (to - from) * numbers.uniform(i, bits); }));
}
static void InplaceUniform(Out self, double from, double to, SEEDED) { uniform(self, from, to, NUMBERS); }
ACLNN(InplaceUniform)
static void InplaceUniformTensor(Out self, double from, double to, SEEDED_ON_DEVICE) {
    uniform(self, from, to, NUMBERS_ON_DEVICE);
}
ACLNN(InplaceUniformTensor)

static void SimThreadExponential(Out self, int64_t count, double rate, SEEDED) {
    Philox numbers = NUMBERS;
    require(count == self.tensor().numel(), "count must be the number of elements, " +
                                                std::to_string(self.tensor().numel()) + ", but is " +
                                                std::to_string(count));
    self.set(drawn<double>(self.sizes(), [&](int64_t i) { return -std::log1p(-numbers.uniform(i)) / rate; }));
}
ACLNN(
    SimThreadExponential, .check = [](Out, int64_t, double rate, int64_t, int64_t) {
        require(rate > 0, "the rate must be positive, but is " + std::to_string(rate));
    })

static at::Tensor normals(at::IntArrayRef shape, const Philox& numbers) {
    return drawn<double>(shape, [&](int64_t i) { return numbers.normal(i); });
}
static void InplaceNormal(Out self, float mean, float std, SEEDED) {
    self.set(normals(self.sizes(), NUMBERS).mul(std).add(mean));
}
ACLNN(InplaceNormal)
static void InplaceNormalTensor(Out self, float mean, float std, SEEDED_ON_DEVICE) {
    self.set(normals(self.sizes(), NUMBERS_ON_DEVICE).mul(std).add(mean));
}
ACLNN(InplaceNormalTensor)
static void NormalFloatFloat(float mean, float std, SEEDED, Out out) {
    out.set(normals(out.sizes(), NUMBERS).mul(std).add(mean));
}
ACLNN(NormalFloatFloat)
static void NormalTensorFloat(In mean, float std, SEEDED, Out out) {
    out.set(normals(out.sizes(), NUMBERS).mul(std).add(mean.tensor()));
}
ACLNN(NormalTensorFloat)
static void NormalFloatTensor(float mean, In std, SEEDED, Out out) {
    out.set(normals(out.sizes(), NUMBERS).mul(std.tensor()).add(mean));
}
ACLNN(NormalFloatTensor)
static void NormalTensorTensor(In mean, In std, SEEDED, Out out) {
    out.set(normals(out.sizes(), NUMBERS).mul(std.tensor()).add(mean.tensor()));
}
ACLNN(NormalTensorTensor)

// Draws integers in [from, to).
static void integers(const Out& self, int64_t from, int64_t to, const Philox& numbers) {
    uint64_t range = uint64_t(to) - uint64_t(from);
    self.set(
        drawn<int64_t>(self.sizes(), [&](int64_t i) { return int64_t(uint64_t(from) + numbers.integer(i) % range); }));
}
// Returns the exclusive upper bound of random_(): the dtype represents all smaller integers exactly.
static int64_t exclusive_maximum(at::ScalarType dtype) {
    switch (dtype) {
        case at::kBool:
            return 2;
        case at::kByte:
            return 256;
        case at::kChar:
            return 128;
        case at::kShort:
            return 1 << 15;
        case at::kInt:
            return int64_t{1} << 31;
        case at::kLong:
            return std::numeric_limits<int64_t>::max();
        default:
            return (int64_t{1} << significand_bits(dtype)) + 1;
    }
}
static void check_range(int64_t from, int64_t to) {
    require(from < to,
            "from must be less than to, but they are " + std::to_string(from) + " and " + std::to_string(to));
}
static void InplaceRandom(Out self, int64_t from, int64_t to, SEEDED) { integers(self, from, to, NUMBERS); }
ACLNN(InplaceRandom, .check = [](Out, int64_t from, int64_t to, int64_t, int64_t) { check_range(from, to); })
static void InplaceRandomTensor(Out self, int64_t from, int64_t to, SEEDED_ON_DEVICE) {
    integers(self, from, to, NUMBERS_ON_DEVICE);
}
ACLNN(InplaceRandomTensor, .check = [](Out, int64_t from, int64_t to, In, In, uint64_t) { check_range(from, to); })
static void InplaceRandomWithoutFromTo(Out self, SEEDED) {
    integers(self, 0, exclusive_maximum(self.dtype()), NUMBERS);
}
ACLNN(InplaceRandomWithoutFromTo)
static void InplaceRandomWithoutFromToTensor(Out self, SEEDED_ON_DEVICE) {
    integers(self, 0, exclusive_maximum(self.dtype()), NUMBERS_ON_DEVICE);
}
ACLNN(InplaceRandomWithoutFromToTensor)

static at::Tensor uniforms(at::IntArrayRef shape, const Philox& numbers) {
    return drawn<double>(shape, [&](int64_t i) { return numbers.uniform(i); });
}
static void InplaceBernoulli(Out self, Number p, SEEDED) {
    self.set(uniforms(self.sizes(), NUMBERS).lt(at::Scalar(p)));
}
ACLNN(InplaceBernoulli, .check = [](Out, Number p, int64_t, int64_t) { check_probability(p.value->toDouble()); })
static void InplaceBernoulliTensor(Out self, In p, SEEDED) {
    self.set(uniforms(self.sizes(), NUMBERS).lt(p.tensor().to(at::kDouble)));
}
ACLNN(InplaceBernoulliTensor)

static void Randperm(int64_t n, SEEDED, Out out) {
    Philox numbers = NUMBERS;
    auto keys = drawn<int64_t>({n}, [&](int64_t i) { return int64_t(numbers.integer(i)); });
    out.set(at::argsort(keys, /*stable=*/true));
}
ACLNN(Randperm, .check = [](int64_t n, int64_t, int64_t, Out out) { require_shape(out, {n}, "out"); })

static void multinomial(const In& self, int64_t samples, bool replacement, const Out& out, const Philox& numbers) {
    auto weights = self.tensor().to(at::kDouble);
    if (replacement) {
        auto cumulated = weights.cumsum(-1).contiguous();
        auto picked = uniforms(out.sizes(), numbers).mul(cumulated.narrow(-1, weights.size(-1) - 1, 1));
        out.set(at::searchsorted(cumulated, picked, /*out_int32=*/false, /*right=*/true));
        return;
    }
    // Takes the smallest of exponential variates whose rates are the weights, then the next.
    auto arrival = uniforms(weights.sizes(), numbers).neg().log1p().neg().div(weights);
    out.set(std::get<1>(at::sort(arrival, /*stable=*/true, -1, false)).narrow(-1, 0, samples));
}
static void check_multinomial(const In& self, int64_t samples, bool replacement) {
    require(self.dim() == 1 || self.dim() == 2,
            "self must have 1 or 2 dimensions, but has shape " + shown(self.sizes()));
    require(samples > 0 && (replacement || samples <= self.size(-1)),
            "num_samples must be positive and, without replacement, at most the number of categories, " +
                std::to_string(self.size(-1)) + ", but is " + std::to_string(samples));
}
static void Multinomial(In self, int64_t samples, bool replacement, SEEDED, Out out) {
    multinomial(self, samples, replacement, out, NUMBERS);
}
ACLNN(
    Multinomial, .check = [](In self, int64_t samples, bool replacement, int64_t, int64_t, Out) {
        check_multinomial(self, samples, replacement);
    })
static void MultinomialTensor(In self, int64_t samples, bool replacement, SEEDED_ON_DEVICE, Out out) {
    multinomial(self, samples, replacement, out, NUMBERS_ON_DEVICE);
}
ACLNN(
    MultinomialTensor, .check = [](In self, int64_t samples, bool replacement, In, In, uint64_t, Out) {
        check_multinomial(self, samples, replacement);
    })

// Selects between CANN's numbers and those of PyTorch on a GPU. The emulator draws its own in both modes.
extern "C" int aclnnSetPytorchRandom(int32_t mode) {
    if (mode == 0 || mode == 1) return 0;
    return fail(161002, "aclnnSetPytorchRandom: mode must be 0 or 1, but is " + std::to_string(mode));
}
