// Factory functions: ranges and identity matrices.
#include "numeric.h"

using namespace emulator;

DOCUMENTED("ops-math: math (the page of each operation)");

// Returns the dtype of the computation: that of the result, or float32 for 16-bit floating point.
static at::ScalarType compute_dtype(const Out& out) {
    return at::isReducedFloatingType(out.dtype()) ? at::kFloat : out.dtype();
}

static void Arange(Number start, Number end, Number step, Out out) {
    out.set(at::arange(start, end, step, compute_dtype(out)));
}
ACLNN(
    Arange, .check = [](Number start, Number end, Number step, Out) {
        require(start.value && end.value && step.value, "start, end and step are required");
        require(step.value->toDouble() != 0, "step must not be 0");
    })
static void Range(Number start, Number end, Number step, Out out) {
    out.set(at::range(start, end, step, compute_dtype(out)));
}
ACLNN(Range)
static void Linspace(Number start, Number end, int64_t steps, Out out) {
    out.set(at::linspace(start, end, steps, compute_dtype(out)));
}
ACLNN(Linspace)
static void LogSpace(Number start, Number end, int64_t steps, double base, Out out) {
    out.set(at::logspace(start, end, steps, base, compute_dtype(out)));
}
ACLNN(LogSpace)
static void Eye(int64_t rows, int64_t columns, Out out) { out.set(at::eye(rows, columns, out.dtype())); }
ACLNN(Eye, .check = [](int64_t rows, int64_t columns, Out out) { require_shape(out, {rows, columns}, "out"); })
