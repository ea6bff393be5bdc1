// Binary arithmetic on two broadcast tensors, or on a tensor and a scalar.
#include "numeric.h"

using namespace emulator;

DOCUMENTED("ops-math: math (the page of each operation)");

static at::ScalarType promoted(const In& self, const In& other) { return at::result_type(self.raw(), other.raw()); }

static void check_operands(const In& self, const In& other, const Out& out) {
    require_shape(out, broadcast(self.sizes(), other.sizes()), "out");
    require_castable(promoted(self, other), out, "out");
}
static void check_binary(In self, In other, Out out) { check_operands(self, other, out); }
static void check_scaled(In self, In other, Number, Out out) { check_operands(self, other, out); }
static void check_binary_inplace(InOut self, In other) { check_operands(self, other, self); }
static void check_scaled_inplace(InOut self, In other, Number) { check_operands(self, other, self); }
static void check_scaled_number(In self, Number, Number, Out out) { require_shape(out, self.sizes(), "out"); }

// self + alpha * other
#define SCALED(name, number_name, function)                                                                   \
    static void name(In self, In other, Number alpha, Out out) { out.set(function(self, other, alpha)); }     \
    ACLNN(name, .check = check_scaled)                                                                        \
    static void Inplace##name(InOut self, In other, Number alpha) { self.set(function(self, other, alpha)); } \
    ACLNN(Inplace##name, .check = check_scaled_inplace)                                                       \
    static void number_name(In self, Number other, Number alpha, Out out) {                                   \
        out.set(function(self.tensor(), other, alpha));                                                       \
    }                                                                                                         \
    ACLNN(number_name, .check = check_scaled_number)                                                          \
    static void Inplace##number_name(InOut self, Number other, Number alpha) {                                \
        self.set(function(self.tensor(), other, alpha));                                                      \
    }                                                                                                         \
    ACLNN(Inplace##number_name)

SCALED(Add, Adds, at::add)
SCALED(Sub, Subs, at::sub)

static void AddV3(Number self, In other, Number alpha, Out out) {  // self + alpha * other
    out.set(at::add(at::scalar_tensor(self, out.dtype()), other, alpha));
}
ACLNN(AddV3)
static void Rsub(In self, In other, Number alpha, Out out) { out.set(at::rsub(self.tensor(), other.tensor(), alpha)); }
ACLNN(Rsub, .check = check_scaled)
static void Rsubs(In self, Number other, Number alpha, Out out) { out.set(at::rsub(self.tensor(), other, alpha)); }
ACLNN(Rsubs, .check = check_scaled_number)

#define BINARY(name, function)                                                       \
    static void name(In self, In other, Out out) { out.set(function(self, other)); } \
    ACLNN(name, .check = check_binary)

#define EXTREME(name, function)                                                      \
    static void name(In self, In other, Out out) { out.set(function(self, other)); } \
    ACLNN(                                                                           \
        name, .check = [](In self, In other, Out out) {                              \
            real_first(self);                                                        \
            check_operands(self, other, out);                                        \
        })

#define BINARY_INPLACE(name, function)                                                   \
    BINARY(name, function)                                                               \
    static void Inplace##name(InOut self, In other) { self.set(function(self, other)); } \
    ACLNN(Inplace##name, .check = check_binary_inplace)

#define NUMBER(name, function)                                                                                \
    static void name(In self, Number other, Out out) { out.set(function(self.tensor(), at::Scalar(other))); } \
    ACLNN(name, .check = check_number)

#define NUMBER_INPLACE(name, function)                                                                            \
    NUMBER(name, function)                                                                                        \
    static void Inplace##name(InOut self, Number other) { self.set(function(self.tensor(), at::Scalar(other))); } \
    ACLNN(Inplace##name)

BINARY_INPLACE(Mul, at::mul)
NUMBER_INPLACE(Muls, at::mul)
NUMBER_INPLACE(Divs, at::div)
BINARY_INPLACE(FloorDivide, at::floor_divide)
NUMBER_INPLACE(FloorDivides, at::floor_divide)
BINARY_INPLACE(RemainderTensorTensor, at::remainder)
NUMBER_INPLACE(RemainderTensorScalar, at::remainder)
BINARY_INPLACE(FmodTensor, at::fmod)
NUMBER_INPLACE(FmodScalar, at::fmod)
BINARY_INPLACE(PowTensorTensor, at::pow)
NUMBER_INPLACE(PowTensorScalar, at::pow)
BINARY_INPLACE(Atan2, at::atan2)
BINARY_INPLACE(XLogYTensor, at::xlogy)
NUMBER_INPLACE(XLogYScalarOther, at::xlogy)
EXTREME(Minimum, at::minimum)
EXTREME(Maximum, at::maximum)
BINARY(LogAddExp, at::logaddexp)
BINARY(LogAddExp2, at::logaddexp2)
BINARY(Gcd, at::gcd)

static void RemainderScalarTensor(Number self, In other, Out out) { out.set(at::remainder(self, other.tensor())); }
ACLNN(RemainderScalarTensor)
static void PowScalarTensor(Number self, In exponent, Out out) { out.set(at::pow(self, exponent.tensor())); }
ACLNN(PowScalarTensor)
static void XLogYScalarSelf(Number self, In other, Out out) { out.set(at::xlogy(self, other.tensor())); }
ACLNN(XLogYScalarSelf)

// True division of integers gives floating point, so the dtype of the quotient must be castable to out's.
static void check_divide(In self, In other, Out out) {
    require_shape(out, broadcast(self.sizes(), other.sizes()), "out");
    auto type = promoted(self, other);
    require_castable(c10::isIntegralType(type, true) ? at::kFloat : type, out, "out");
}
static void check_divide_inplace(InOut self, In other) { check_divide(self, other, self); }
static void Div(In self, In other, Out out) { out.set(at::div(self, other)); }
ACLNN(Div, .check = check_divide)
static void InplaceDiv(InOut self, In other) { self.set(at::div(self, other)); }
ACLNN(InplaceDiv, .check = check_divide_inplace)

static std::optional<std::string_view> rounding(int mode) {
    static constexpr std::optional<std::string_view> kModes[] = {std::nullopt, "trunc", "floor"};
    require(mode >= 0 && mode <= 2, "the rounding mode must be 0, 1 or 2, but is " + std::to_string(mode));
    return kModes[mode];
}
static void check_mode(In self, In other, int mode, Out out) {
    rounding(mode);
    require_shape(out, broadcast(self.sizes(), other.sizes()), "out");
}
static void DivMod(In self, In other, int mode, Out out) {
    out.set(at::div(self.tensor(), other.tensor(), rounding(mode)));
}
ACLNN(DivMod, .check = check_mode)
static void DivMods(In self, Number other, int mode, Out out) {
    out.set(at::div(self.tensor(), other, rounding(mode)));
}
ACLNN(DivMods)
static void InplaceDivMod(InOut self, In other, int mode) {
    self.set(at::div(self.tensor(), other.tensor(), rounding(mode)));
}
ACLNN(InplaceDivMod)
static void InplaceDivMods(InOut self, Number other, int mode) {
    self.set(at::div(self.tensor(), other, rounding(mode)));
}
ACLNN(InplaceDivMods)
