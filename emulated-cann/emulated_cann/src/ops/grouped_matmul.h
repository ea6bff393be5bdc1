// A call of GroupedMatmul, whichever version of it.
#pragma once

#include <optional>
#include <vector>

#include "grouped.h"

namespace emulator {

// What the types of x and weight make of a product.
enum class Precision { plain, int8, mixed, weight_only };  // mixed: int8 x, int4 weight

struct GroupedCall {
    Ins x;
    Weights weight;
    Ins bias, scale, offset, antiquant_scale, antiquant_offset, token_scale;
    In group_list;
    std::optional<std::vector<int64_t>> ends;  // version 1 has them on the host, instead of group_list
    int64_t split_item, group_type, list_type, act_type;
    Outs out;
    bool weight_nz = false;  // WeightNz: the version for weights in FRACTAL_NZ

    bool single_weight() const { return weight.size() == 1 && weight[0].dim() == 3; }
    int64_t experts() const { return single_weight() ? weight[0].size(0) : int64_t(weight.size()); }
    bool has_list() const { return bool(group_list) || ends; }
    // int4 values are given eight to an int32, along whichever dimension is contiguous.
    bool is_int4() const { return weight[0].dtype() == at::kInt; }
    int64_t inner(size_t index) const {
        return weight[index].size(-2) * (is_int4() && weight[index].is_transposed() ? 8 : 1);
    }
    int64_t columns(size_t index) const {
        return weight[index].size(-1) * (is_int4() && !weight[index].is_transposed() ? 8 : 1);
    }
    Precision precision() const;
};

// These throw Refused: for types and settings, and for those and shapes, of version 1 and of the later ones.
void check_types(const GroupedCall& call, Line line);
void check_grouped_v1(const GroupedCall& call);
void check_grouped(const GroupedCall& call);

}  // namespace emulator
