// Operations that create complex tensors or read their parts.
#include "numeric.h"

using namespace emulator;

static void Complex(In real, In imag, Out out) { out.set(at::complex(real, imag)); }
ACLNN(Complex)
static void Polar(In abs, In angle, Out out) { out.set(at::polar(abs, angle)); }
ACLNN(Polar)
static void AngleV2(In self, Out out) { out.set(at::angle(self)); }
ACLNN(AngleV2)
