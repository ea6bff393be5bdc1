// Reductions along dimensions. An empty list of dimensions means all of them.
#include "numeric.h"

using namespace emulator;

DOCUMENTED("ops-math: math (the page of each operation)");

static std::vector<int64_t> reduced(const In& self, std::vector<int64_t> dims, bool keepdim) {
    std::vector<bool> is_reduced(self.dim(), dims.empty());
    for (auto dim : dims)
        if (wrap(dim, self.dim()) < self.dim())
            is_reduced[wrap(dim, self.dim())] = true;  // dim 0 is valid for a scalar
    std::vector<int64_t> shape;
    for (int64_t d = 0; d < self.dim(); ++d) {
        if (!is_reduced[d]) shape.push_back(self.size(d));
        if (is_reduced[d] && keepdim) shape.push_back(1);
    }
    return shape;
}

static at::OptionalIntArrayRef along(const Ints& dims) {
    return dims.values.empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(at::IntArrayRef(dims.values));
}

// Returns self in the dtype of accumulation: that of the result, or float32 for 16-bit floating point.
static at::Tensor accumulated(const In& self, const Out& out) {
    auto type = at::isReducedFloatingType(out.dtype()) ? at::kFloat : out.dtype();
    return self.tensor().to(type);
}

static void check_typed(In self, Ints dims, bool keepdim, aclDataType dtype, Out out) {
    require(scalar_type(dtype) == out.dtype(),
            "out must have the requested dtype, " + c10::str(scalar_type(dtype), ", not ", out.dtype()));
    require_shape(out, reduced(self, dims.values, keepdim), "out");
}
static void check_dims(In self, Ints dims, bool keepdim, Out out) {
    require_shape(out, reduced(self, dims.values, keepdim), "out");
}
static void check_extreme(In self, Ints dims, bool keepdim, Out out) {
    real_first(self);
    check_dims(self, dims, keepdim, out);
}
static void check_all(In, Out out) { require_shape(out, {}, "out"); }
static void check_dim(In self, int64_t dim, bool keepdim, Out out, Out indices) {
    require_shape(out, reduced(self, {dim}, keepdim), "out");
    require_shape(indices, reduced(self, {dim}, keepdim), "indices");
}
static void check_arg(In self, int64_t dim, bool keepdim, Out out) {
    require_shape(out, reduced(self, {dim}, keepdim), "out");
    require_dtype(out, {at::kLong, at::kInt}, "out");
}

static void Mean(In self, Ints dims, bool keepdim, aclDataType, Out out) {
    out.set(at::mean(accumulated(self, out), along(dims), keepdim));
}
ACLNN(
    Mean, .check = [](In self, Ints dims, bool keepdim, aclDataType dtype, Out out) {
        check_typed(self, dims, keepdim, dtype, out);
        if (c10::isIntegralType(out.dtype(), true)) throw NotEmulated("a mean in integers is not emulated");
    })
static void ReduceSum(In self, Ints dims, bool keepdim, aclDataType, Out out) {
    out.set(at::sum(accumulated(self, out), along(dims), keepdim));
}
ACLNN(ReduceSum, .check = check_typed)
static void ReduceNansum(In self, Ints dims, bool keepdim, aclDataType, Out out) {
    out.set(at::nansum(accumulated(self, out), along(dims), keepdim));
}
ACLNN(ReduceNansum, .check = check_typed)
static void Prod(In self, aclDataType, Out out) { out.set(at::prod(accumulated(self, out))); }
ACLNN(Prod)
static void ProdDim(In self, int64_t dim, bool keepdim, aclDataType, Out out) {
    out.set(at::prod(accumulated(self, out), dim, keepdim));
}
ACLNN(ProdDim)

static void Amax(In self, Ints dims, bool keepdim, Out out) { out.set(at::amax(self, dims.values, keepdim)); }
ACLNN(Amax, .check = check_extreme)
static void Amin(In self, Ints dims, bool keepdim, Out out) { out.set(at::amin(self, dims.values, keepdim)); }
ACLNN(Amin, .check = check_extreme)
static void Aminmax(In self, Ints dims, bool keepdim, Out min, Out max) {
    min.set(at::amin(self, dims.values, keepdim));
    max.set(at::amax(self, dims.values, keepdim));
}
ACLNN(Aminmax)
static void AminmaxDim(In self, int64_t dim, bool keepdim, Out min, Out max) {
    min.set(at::amin(self, dim, keepdim));
    max.set(at::amax(self, dim, keepdim));
}
ACLNN(AminmaxDim)
static void AminmaxAll(In self, Out min, Out max) {
    min.set(at::min(self));
    max.set(at::max(self));
}
ACLNN(AminmaxAll)
static void Max(In self, Out out) { out.set(at::max(self)); }
ACLNN(Max, .check = check_all)
static void Min(In self, Out out) { out.set(at::min(self)); }
ACLNN(Min, .check = check_all)

#define WITH_INDICES(name, function)                                             \
    static void name(In self, int64_t dim, bool keepdim, Out out, Out indices) { \
        auto [values, where] = function(self.tensor(), dim, keepdim);            \
        out.set(values);                                                         \
        indices.set(where);                                                      \
    }                                                                            \
    ACLNN(name, .check = check_dim)

WITH_INDICES(MaxDim, at::max)
WITH_INDICES(MinDim, at::min)
WITH_INDICES(MedianDim, at::median)
WITH_INDICES(NanMedianDim, at::nanmedian)

static void Median(In self, Out out) { out.set(at::median(self)); }
ACLNN(Median, .check = check_all)
static void NanMedian(In self, Out out) { out.set(at::nanmedian(self)); }
ACLNN(NanMedian, .check = check_all)
static void Kthvalue(In self, int64_t k, int64_t dim, bool keepdim, Out out, Out indices) {
    auto [values, where] = at::kthvalue(self.tensor(), k, dim, keepdim);
    out.set(values);
    indices.set(where);
}
ACLNN(Kthvalue)
static void ArgMax(In self, int64_t dim, bool keepdim, Out out) { out.set(at::argmax(self, dim, keepdim)); }
ACLNN(ArgMax, .check = check_arg)
static void ArgMin(In self, int64_t dim, bool keepdim, Out out) { out.set(at::argmin(self, dim, keepdim)); }
ACLNN(ArgMin, .check = check_arg)

// Treats elements as booleans, so the result of a uint8 tensor is 0 or 1.
static at::Tensor any_of(const at::Tensor& self, const Ints& dims, bool keepdim) {
    auto truth = self.to(at::kBool);
    return dims.values.empty()
               ? at::any(truth).reshape(keepdim ? std::vector<int64_t>(self.dim(), 1) : std::vector<int64_t>())
               : at::any(truth, at::OptionalIntArrayRef(dims.values), keepdim);
}
static void Any(In self, Ints dims, bool keepdim, Out out) { out.set(any_of(self, dims, keepdim)); }
ACLNN(Any, .check = check_dims)
static void All(In self, Ints dims, bool keepdim, Out out) {
    out.set(any_of(self.tensor().to(at::kBool).logical_not(), dims, keepdim).logical_not());
}
ACLNN(All, .check = check_dims)

static at::Tensor variance(const In& self, const Ints& dims, int64_t correction, bool keepdim) {
    return at::var(widen(self), along(dims), std::optional<at::Scalar>(correction), keepdim);
}
static void VarCorrection(In self, Ints dims, int64_t correction, bool keepdim, Out out) {
    out.set(variance(self, dims, correction, keepdim));
}
ACLNN(VarCorrection)
static void VarMean(In self, Ints dims, int64_t correction, bool keepdim, Out var, Out mean) {
    var.set(variance(self, dims, correction, keepdim));
    mean.set(at::mean(widen(self), along(dims), keepdim));
}
ACLNN(VarMean)
static void Std(In self, Ints dims, int64_t correction, bool keepdim, Out out) {
    out.set(variance(self, dims, correction, keepdim).sqrt());
}
ACLNN(Std)
static void StdMeanCorrection(In self, Ints dims, int64_t correction, bool keepdim, Out std, Out mean) {
    std.set(variance(self, dims, correction, keepdim).sqrt());
    mean.set(at::mean(widen(self), along(dims), keepdim));
}
ACLNN(StdMeanCorrection)

static void LinalgVectorNorm(In self, Number ord, Ints dims, bool keepdim, aclDataType, Out out) {
    out.set(at::linalg_vector_norm(accumulated(self, out), ord, along(dims), keepdim));
}
ACLNN(
    LinalgVectorNorm, .check = [](In self, Number, Ints dims, bool keepdim, aclDataType dtype, Out out) {
        check_typed(self, dims, keepdim, dtype, out);
    })
static void Norm(In self, Number p, Ints dims, bool keepdim, Out out) {
    out.set(at::linalg_vector_norm(widen(self), p, along(dims), keepdim));
}
ACLNN(Norm)
static void LogSumExp(In self, Ints dims, bool keepdim, Out out) {
    out.set(at::logsumexp(widen(self), dims.values, keepdim));
}
ACLNN(LogSumExp, .check = check_dims)
static void Trace(In self, Out out) { out.set(at::trace(widen(self))); }
ACLNN(Trace, .check = check_all)
