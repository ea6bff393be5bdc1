// What the products of groups of rows with a matrix each share: which rows are whose, and the matrices.
#pragma once

#include <string>
#include <vector>

#include "op.h"

namespace emulator {

// Product lines that the documents tell apart.
enum class Line { a2_a3, inference, a5 };

// That of the emulated device; `operation` is what the refusal of any other device names.
Line product_line(const std::string& operation);

// A matrix for each group: 2 dimensions, or 3 for those of several groups. In FRACTAL_NZ, callers may give the view of
// the tiles instead of the view of the matrices: [..., N / C0, K / 16, 16, C0] instead of [..., K, N].
class Weight : public In {
  public:
    Weight(const aclTensor* handle, bool always_nz = false);
    bool is_nz() const { return !matrix_.empty(); }
    // The last two dimensions are those of the memory, swapped.
    bool is_transposed() const;
    // That of a group, [rows, columns]. In FRACTAL_NZ only this one is copied.
    at::Tensor matrix(int64_t index) const;
};
using Weights = List<Weight>;

// Of an operation that takes its memory for FRACTAL_NZ, whatever its format: tiles may say that they are ND.
class NzWeight : public Weight {
  public:
    NzWeight(const aclTensor* handle);
};

// Rows from `begin` on, which multiply the matrix of `expert`.
struct Group {
    int64_t expert, begin, rows;
};

// How a list of groups reads: where each ends, how many rows each has, or pairs of a group and its rows.
enum ListType : int64_t { kEnds = 0, kCounts = 1, kPairs = 2 };

// The groups of a device's list, which is read now; throws if it goes beyond `rows` or names no expert.
std::vector<Group> groups_of(const at::Tensor& list, int64_t type, int64_t rows, int64_t experts);

}  // namespace emulator
