// Linear algebra without matrix products, and distances.
#include "numeric.h"

using namespace emulator;

static void Inverse(In self, Out out) { out.set(at::inverse(self)); }
ACLNN(Inverse)
static void LinalgCholesky(In self, bool upper, Out out) { out.set(at::linalg_cholesky(self, upper)); }
ACLNN(LinalgCholesky)
static void LinalgCross(In self, In other, int64_t dim, Out out) {
    out.set(at::linalg_cross(widen(self), widen(other), dim));
}
ACLNN(LinalgCross)
static void Cdist(In x1, In x2, float p, int64_t mode, Out out) { out.set(at::cdist(widen(x1), widen(x2), p, mode)); }
ACLNN(Cdist)
static void Renorm(In self, Number p, int64_t dim, Number maxnorm, Out out) {
    out.set(at::renorm(widen(self), p, dim, maxnorm));
}
ACLNN(Renorm)
static void InplaceRenorm(InOut self, Number p, int64_t dim, Number maxnorm) {
    self.set(at::renorm(widen(self), p, dim, maxnorm));
}
ACLNN(InplaceRenorm)
