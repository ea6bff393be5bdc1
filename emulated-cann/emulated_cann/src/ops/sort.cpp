// Sorting, selection and counting. Some outputs have a shape that depends on the data; see Resizable.
#include "numeric.h"

using namespace emulator;

DOCUMENTED("ops-math: math (the page of each operation); ops-nn: index (the page of each operation)");

static void check_sort(In self, bool, int64_t dim, bool, Out values, Out indices) {
    wrap(dim, self.dim());
    require_shape(values, self.sizes(), "values");
    require_shape(indices, self.sizes(), "indices");
}
static void Sort(In self, bool, int64_t dim, bool descending, Out values, Out indices) {
    auto [sorted, order] = at::sort(self.tensor(), /*stable=*/true, dim, descending);
    values.set(sorted);
    indices.set(order);
}
ACLNN(Sort, .check = check_sort)

static void check_top(const In& self, int64_t k, int64_t dim, const Out& values, const Out& indices) {
    auto shape = self.sizes().vec();
    dim = wrap(dim, self.dim());
    int64_t size = shape.empty() ? 1 : shape[dim];
    require(k >= 0 && k <= size, "k must be between 0 and the size of the dimension, " + std::to_string(size) +
                                     ", but is " + std::to_string(k));
    if (!shape.empty()) shape[dim] = k;
    require_shape(values, shape, "values");
    require_shape(indices, shape, "indices");
    require_dtype(indices, {at::kLong}, "indices");
}
// Takes the first of equal elements, so that results do not depend on the machine.
static void top(const In& self, int64_t k, int64_t dim, bool largest, const Out& values, const Out& indices) {
    auto [sorted, order] = at::sort(self.tensor(), /*stable=*/true, dim, /*descending=*/largest);
    bool scalar = self.dim() == 0;
    values.set(scalar ? sorted : sorted.narrow(dim, 0, k));
    indices.set(scalar ? order : order.narrow(dim, 0, k));
}
static void Topk(In self, int64_t k, int64_t dim, bool largest, bool, Out values, Out indices) {
    top(self, k, dim, largest, values, indices);
}
ACLNN(
    Topk, .check = [](In self, int64_t k, int64_t dim, bool, bool, Out values, Out indices) {
        check_top(self, k, dim, values, indices);
    })
static void TopkV2(In self, int64_t k, int64_t dim, bool largest, bool, bool, Out values, Out indices) {
    top(self, k, dim, largest, values, indices);
}
ACLNN(
    TopkV2, .check = [](In self, int64_t k, int64_t dim, bool, bool, bool, Out values, Out indices) {
        check_top(self, k, dim, values, indices);
    })

static void Nonzero(In self, Resizable out) { out.set(at::nonzero(self)); }
ACLNN(Nonzero)
static void NonzeroV2(In self, Resizable out) { out.set(at::nonzero(self).t()); }
ACLNN(NonzeroV2)
static void MaskedSelect(In self, In mask, Resizable out) {
    out.set(at::masked_select(self, mask.tensor().to(at::kBool)));
}
ACLNN(
    MaskedSelect, .check = [](In self, In mask, Resizable) {
        require_dtype(mask, {at::kBool, at::kByte}, "mask");
        broadcast(self.sizes(), mask.sizes());
    })

static void Unique(In self, bool sorted, bool return_inverse, Resizable out, Out inverse) {
    auto [values, where, counts] = at::_unique2(self, sorted, return_inverse);
    out.set(values);
    if (return_inverse) inverse.set(where);
}
ACLNN(Unique)
static void Unique2(In self, bool sorted, bool return_inverse, bool return_counts, Resizable out, Out inverse,
                    Resizable counts) {
    auto [values, where, numbers] = at::_unique2(self, sorted, true, return_counts);
    out.set(values);
    if (return_inverse || return_counts) inverse.set(where);
    if (return_counts) counts.set(numbers);
}
ACLNN(Unique2)
static void UniqueDim(In self, bool sorted, bool return_inverse, int64_t dim, Resizable out, Resizable inverse,
                      Resizable counts) {
    auto [values, where, numbers] = at::unique_dim(self, dim, sorted, true, true);
    out.set(values);
    inverse.set(where);
    counts.set(numbers);
}
ACLNN(UniqueDim)
static void UniqueConsecutive(In self, bool return_inverse, bool return_counts, int64_t dim, Resizable out,
                              Resizable inverse, Resizable counts) {
    constexpr int64_t kNone = 1000;  // flattens the tensor
    std::optional<int64_t> along = dim == kNone ? std::nullopt : std::optional<int64_t>(dim);
    auto [values, where, numbers] = at::unique_consecutive(self, return_inverse, return_counts, along);
    out.set(values);
    if (return_inverse) inverse.set(where);
    if (return_counts) counts.set(numbers);
}
ACLNN(UniqueConsecutive)

static void Bincount(In self, In weights, int64_t minlength, Out out) {
    std::optional<at::Tensor> given = weights ? std::optional<at::Tensor>(weights.tensor()) : std::nullopt;
    out.set(at::bincount(self, given, minlength));
}
ACLNN(Bincount)
static void Histc(In self, int64_t bins, Number min, Number max, Out out) {
    out.set(at::histc(self.tensor().to(at::kFloat), bins, min, max));
}
ACLNN(Histc)
