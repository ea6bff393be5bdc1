// Linear algebra without matrix products, and distances.
#include "numeric.h"

using namespace emulator;

static void Inverse(In self, Out out) { out.set(at::inverse(self)); }
ACLNN(Inverse)
static void LinalgCholesky(In self, bool upper, Out out) { out.set(at::linalg_cholesky(self, upper)); }
ACLNN(LinalgCholesky)
static void Svd(In self, bool full, bool compute, Out values, Out left, Out right) {
    auto [u, s, vh] = at::_linalg_svd(self, full, compute);
    values.set(s);
    if (!compute) return;
    left.set(u);
    right.set(vh.mH());
}
ACLNN(Svd)
static void LinalgQr(In self, int64_t mode, Out q, Out r) {
    constexpr const char* kModes[] = {"reduced", "complete", "r"};
    auto [orthogonal, triangular] = at::linalg_qr(self, kModes[mode]);
    if (mode != 2) q.set(orthogonal);
    r.set(triangular);
}
ACLNN(LinalgQr)
static void TriangularSolve(In self, In factor, bool upper, bool transpose, bool unit, Out out, Out copy) {
    auto a = transpose ? factor.tensor().mT() : factor.tensor();
    out.set(at::linalg_solve_triangular(a, self, upper != transpose, true, unit));
    copy.set(factor);
}
ACLNN(TriangularSolve)
static void Pdist(In self, float p, Out out) { out.set(at::pdist(widen(self).contiguous(), p)); }
ACLNN(Pdist, .check = floating_first)
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
