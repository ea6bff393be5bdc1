// A call of GroupedMatmulSwigluQuant, whichever version of it.
#pragma once

#include "grouped.h"

namespace emulator {

struct SwigluCall {
    In x;
    Weights weight;
    Ins weight_scale, assist;  // assist: of int4 weights beside int8 x
    In x_scale, smooth, group_list;
    int64_t list_type;
    Out y, y_scale;
    int64_t product_type = 0;  // of the products before SwiGLU: 0 float32, 1 float16, 27 bfloat16

    bool single() const { return weight[0].dim() == 3; }
    int64_t experts() const { return single() ? weight[0].size(0) : int64_t(weight.size()); }
    // int4 values are given eight to an int32, along whichever dimension is contiguous.
    bool int4_x() const { return x.dtype() == at::kInt; }
    bool int4_weight() const { return weight[0].dtype() == at::kInt; }
    int64_t inner() const { return x.size(1) * (int4_x() ? 8 : 1); }
    int64_t rows(const Weight& matrix) const {
        return matrix.size(-2) * (int4_weight() && matrix.is_transposed() ? 8 : 1);
    }
    int64_t columns(const Weight& matrix) const {
        return matrix.size(-1) * (int4_weight() && !matrix.is_transposed() ? 8 : 1);
    }
    int64_t columns() const { return columns(weight[0]); }
};

// These throw Refused: for a call of the first version, and for one of the second, whose entry for weights in
// FRACTAL_NZ, whatever format they say, is `weight_nz`.
void check_first_swiglu(const SwigluCall& call, bool weight_nz, const In& offset);
void check_second_swiglu(const SwigluCall& call, bool weight_nz, const In& bias, int64_t dequant_mode,
                         int64_t quant_mode, const Ints& tuning);

}  // namespace emulator
