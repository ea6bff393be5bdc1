// What operations of several families share: how results are rounded, and constraints that many of them have.
#pragma once

#include <initializer_list>
#include <sstream>
#include <string>

#include "op.h"

namespace emulator {

DOCUMENTED("ops-math: math (the page of each operation); ops-nn: index (the page of each operation)");

// Kernels compute on 16-bit floating point in float32 and round once, at the end.
inline at::Tensor widen(const at::Tensor& tensor) {
    return at::isReducedFloatingType(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor;
}
inline at::Tensor widen(const In& argument) { return widen(argument.tensor()); }

inline std::string shown(at::IntArrayRef shape) {
    std::ostringstream text;
    text << shape;
    return text.str();
}

inline void require(bool condition, const std::string& reason) {
    if (!condition) throw Refused(reason);
}

inline void require_shape(const In& tensor, at::IntArrayRef shape, const char* name) {
    if (tensor && tensor.sizes() != shape)
        throw Refused(std::string(name) + " has shape " + shown(tensor.sizes()) + ", it should have " + shown(shape));
}

inline void require_castable(at::ScalarType from, const In& to, const char* name) {
    if (to && !c10::canCast(from, to.dtype()))
        throw Refused(std::string("a result of type ") + c10::toString(from) + " cannot be cast to " + name + "'s " +
                      c10::toString(to.dtype()));
}

inline void require_dtype(const In& tensor, std::initializer_list<at::ScalarType> allowed, const char* name) {
    if (!tensor) return;
    for (auto dtype : allowed)
        if (tensor.dtype() == dtype) return;
    std::string list;
    for (auto dtype : allowed) list += std::string(list.empty() ? "" : ", ") + c10::toString(dtype);
    throw Refused(std::string(name) + " is " + c10::toString(tensor.dtype()) + ", it must be one of " + list);
}

inline int64_t wrap(int64_t dim, int64_t dims) {
    int64_t range = dims ? dims : 1;
    if (dim < -range || dim >= range)
        throw Refused("dimension " + std::to_string(dim) + " is out of range for " + std::to_string(dims) +
                      " dimensions");
    return dim < 0 ? dim + range : dim;
}

// Throws Refused where at::infer_size throws c10::Error with a longer text.
std::vector<int64_t> broadcast(at::IntArrayRef a, at::IntArrayRef b);

}  // namespace emulator
