// Cumulative sums, products, maxima and minima.
#include "numeric.h"

using namespace emulator;

DOCUMENTED("ops-math: math (the page of each operation)");

static at::Tensor accumulated(const In& self, const In& out) {
    return self.tensor().to(at::isReducedFloatingType(out.dtype()) ? at::kFloat : out.dtype());
}
static void check(In self, int64_t dim, aclDataType, Out out) {
    wrap(dim, self.dim());
    require_shape(out, self.sizes(), "out");
}
static void check_with_indices(In self, int64_t dim, Out values, Out indices) {
    wrap(dim, self.dim());
    require_shape(values, self.sizes(), "values");
    require_shape(indices, self.sizes(), "indices");
}

static void Cumsum(In self, int64_t dim, aclDataType, Out out) { out.set(at::cumsum(accumulated(self, out), dim)); }
ACLNN(Cumsum, .check = check)
static void Cumprod(In self, Number dim, aclDataType, Out out) {
    out.set(at::cumprod(accumulated(self, out), dim.value->toLong()));
}
ACLNN(
    Cumprod,
    .check = [](In self, Number dim, aclDataType dtype, Out out) { check(self, dim.value->toLong(), dtype, out); })
static void InplaceCumprod(InOut self, Number dim) {
    self.set(at::cumprod(accumulated(self, self), dim.value->toLong()));
}
ACLNN(InplaceCumprod)
static void Cummax(In self, int64_t dim, Out values, Out indices) {
    auto [extremes, where] = at::cummax(self.tensor(), dim);
    values.set(extremes);
    indices.set(where);
}
ACLNN(Cummax, .check = check_with_indices)
static void Cummin(In self, int64_t dim, Out values, Out indices) {
    auto [extremes, where] = at::cummin(self.tensor(), dim);
    values.set(extremes);
    indices.set(where);
}
ACLNN(Cummin, .check = check_with_indices)
