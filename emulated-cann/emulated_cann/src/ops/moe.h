// What the routing operations of mixtures of experts share.
#pragma once

#include <initializer_list>
#include <string>

#include "numeric.h"

namespace emulator {

// Chips by the documents' tables of products: Atlas A2 and A3, "Atlas inference series" and Ascend 950PR/950DT.
enum class Chip { a2_a3, ascend310p, ascend950, other };
Chip chip();
inline bool on(std::initializer_list<Chip> chips) {
    for (auto each : chips)
        if (each == chip()) return true;
    return false;
}

inline bool is_any(const In& tensor, std::initializer_list<at::ScalarType> dtypes) {
    for (auto each : dtypes)
        if (each == tensor.dtype()) return true;
    return false;
}
inline bool is_floating(const In& tensor) { return is_any(tensor, {at::kHalf, at::kBFloat16, at::kFloat}); }
inline bool has_shape(const In& tensor, at::IntArrayRef shape) { return tensor.sizes() == shape; }

// The choices of all tokens, flat, in the order of their experts; within an expert in the order of the tokens.
// Choices of experts outside [first, end) come last: first those from `end` on, by expert, then those before `first`.
struct SortedChoices {
    at::Tensor places;   // int64 [choices]: where each choice is in the flat expert_idx
    at::Tensor experts;  // int64 [active]: the experts of those inside the range, less `first`
    int64_t active;      // how many are inside the range
};
SortedChoices sort_choices(const at::Tensor& expert_idx, int64_t first, int64_t end);

// int64 [range]: how many choices each expert of the range has.
at::Tensor count_choices(const SortedChoices& sorted, int64_t range);

// int64 [active]: the slot of each sorted choice in [range, capacity], or -1 if its expert has no room for it.
at::Tensor place_in_slots(const SortedChoices& sorted, const at::Tensor& counts, int64_t capacity);

// Where each choice went, by its place in expert_idx: int64 [choices], -1 for none.
at::Tensor gather_index(const SortedChoices& sorted, const at::Tensor& destinations);

// Writes the first rows of an output; the others keep what they held.
void write_first(const Out& output, const at::Tensor& rows);

// int8 values rounded half to even. A row of zeros has a scale of zero.
at::Tensor quantize_by(const at::Tensor& values, const at::Tensor& scale, const at::Tensor& offset);
struct QuantizedRows {
    at::Tensor values, scales;  // int8 [rows, H], float32 [rows]
};
QuantizedRows quantize_each(const at::Tensor& rows);

}  // namespace emulator
