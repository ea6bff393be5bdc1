// Tensors made of nothing: ranges and identities.
#include "numeric.h"

using namespace emulator;

DOCUMENTED("ops-math: math (the page of each operation)");

// In the type of the result, or float32 for 16-bit floating point.
static at::ScalarType computed(const Out& out) {
    return at::isReducedFloatingType(out.dtype()) ? at::kFloat : out.dtype();
}

static void Arange(Number start, Number end, Number step, Out out) {
    out.set(at::arange(start, end, step, computed(out)));
}
ACLNN(
    Arange, .check = [](Number start, Number end, Number step, Out) {
        require(start.value && end.value && step.value, "start, end and step must be given");
        require(step.value->toDouble() != 0, "step must not be 0");
    })
static void Range(Number start, Number end, Number step, Out out) {
    out.set(at::range(start, end, step, computed(out)));
}
ACLNN(Range)
static void Linspace(Number start, Number end, int64_t steps, Out out) {
    out.set(at::linspace(start, end, steps, computed(out)));
}
ACLNN(Linspace)
static void LogSpace(Number start, Number end, int64_t steps, double base, Out out) {
    out.set(at::logspace(start, end, steps, base, computed(out)));
}
ACLNN(LogSpace)
static void Eye(int64_t rows, int64_t columns, Out out) { out.set(at::eye(rows, columns, out.dtype())); }
ACLNN(Eye, .check = [](int64_t rows, int64_t columns, Out out) { require_shape(out, {rows, columns}, "out"); })
