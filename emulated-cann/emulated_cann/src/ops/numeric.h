// Helpers that several families of operations share: widening of 16-bit floating point and common constraints.
#pragma once

#include <initializer_list>
#include <sstream>
#include <string>

#include "op.h"

namespace emulator {

DOCUMENTED("ops-math: math (the page of each operation); ops-nn: index (the page of each operation)");

// Converts 16-bit floating point to float32. Kernels compute in float32 and round once, at the end.
inline at::Tensor widen(const at::Tensor& tensor) {
    return at::isReducedFloatingType(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor;
}
inline at::Tensor widen(const In& argument) { return widen(argument.tensor()); }
inline std::optional<at::Tensor> widen_given(const In& argument) {
    return argument ? std::optional<at::Tensor>(widen(argument)) : std::nullopt;
}

inline bool is_transposed(const In& matrix) { return matrix.raw().stride(-2) == 1 && matrix.raw().stride(-1) != 1; }

inline at::Tensor wide(const In& index) { return index.tensor().to(at::kLong); }
inline std::string shown(at::IntArrayRef shape) {
    std::ostringstream text;
    text << shape;
    return text.str();
}

inline void require_shape(const In& tensor, at::IntArrayRef shape, const char* name) {
    if (tensor && tensor.sizes() != shape)
        throw Refused(std::string(name) + " must have shape " + shown(shape) + ", but has " + shown(tensor.sizes()));
}

inline void require_castable(at::ScalarType from, const In& to, const char* name) {
    if (to && !c10::canCast(from, to.dtype()))
        throw Refused(std::string("result type ") + c10::toString(from) + " cannot be cast to the dtype of " + name +
                      ", " + c10::toString(to.dtype()));
}

inline void require_dtype(const In& tensor, std::initializer_list<at::ScalarType> allowed, const char* name) {
    if (!tensor) return;
    for (auto dtype : allowed)
        if (tensor.dtype() == dtype) return;
    std::string list;
    for (auto dtype : allowed) list += std::string(list.empty() ? "" : ", ") + c10::toString(dtype);
    throw Refused(std::string(name) + " must be one of " + list + ", but is " + c10::toString(tensor.dtype()));
}

inline void check_probability(double p) {
    require(p >= 0 && p <= 1, "p must be between 0 and 1, but is " + std::to_string(p));
}

// Checks for operations whose first argument must be floating point, or not complex.
template <class... Rest>
void floating_first(In first, Rest...) {
    if (!at::isFloatingType(first.dtype()))
        throw NotEmulated(std::string("the dtype ") + c10::toString(first.dtype()) + " is not emulated");
}
template <class... Rest>
void real_first(In self, Rest...) {
    require(!at::isComplexType(self.dtype()), std::string("self must not be ") + c10::toString(self.dtype()));
}

inline int64_t wrap(int64_t dim, int64_t dims) {
    int64_t range = dims ? dims : 1;
    if (dim < -range || dim >= range)
        throw Refused("dim must be in the range of " + std::to_string(dims) + " dimensions, but is " +
                      std::to_string(dim));
    return dim < 0 ? dim + range : dim;
}

inline void same_shape(In self, Out out) { require_shape(out, self.sizes(), "out"); }
inline void check_number(In self, Number, Out out) { require_shape(out, self.sizes(), "out"); }

// Returns the broadcast shape. Throws Refused, unlike at::infer_size, whose c10::Error has a longer text.
std::vector<int64_t> broadcast(at::IntArrayRef a, at::IntArrayRef b);

}  // namespace emulator
