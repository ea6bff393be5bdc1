// Softmax, computed in float32 and rounded once.
#include "numeric.h"

using namespace emulator;

DOCUMENTED("ops-nn: activation (the page of each operation)");

static void check_softmax(In self, int64_t dim, Out out) {
    require_dtype(self, {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}, "self");
    wrap(dim, self.dim());
    require_shape(out, self.sizes(), "out");
}
static void Softmax(In self, int64_t dim, Out out) { out.set(at::softmax(widen(self), dim)); }
ACLNN(Softmax, .check = check_softmax)
static void LogSoftmax(In self, int64_t dim, Out out) { out.set(at::log_softmax(widen(self), dim)); }
ACLNN(LogSoftmax, .check = check_softmax)
