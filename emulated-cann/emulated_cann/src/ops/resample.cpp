// Interpolation to another size, and sampling at the positions of a grid.
#include "numeric.h"

using namespace emulator;

// A factor that is not positive is absent: the sizes determine it.
static std::optional<double> factor(double scale) { return scale > 0 ? std::optional<double>(scale) : std::nullopt; }

#define ONE_FACTOR(name, function, type)                                      \
    static void name(In self, Ints size, type scale, Out out) {               \
        out.set(function(widen(self), size.values, factor(scale)));           \
    }                                                                         \
    ACLNN(name, .check = floating_first)
#define TWO_FACTORS(name, function, type)                                           \
    static void name(In self, Ints size, type height, type width, Out out) {        \
        out.set(function(widen(self), size.values, factor(height), factor(width))); \
    }                                                                               \
    ACLNN(name, .check = floating_first)
#define THREE_FACTORS(name, function)                                                              \
    static void name(In self, Ints size, double depth, double height, double width, Out out) {     \
        out.set(function(widen(self), size.values, factor(depth), factor(height), factor(width))); \
    }                                                                                              \
    ACLNN(name, .check = floating_first)
#define ALIGNED(name, function)                                                                    \
    static void name(In self, Ints size, bool aligned, double height, double width, Out out) {     \
        out.set(function(widen(self), size.values, aligned, factor(height), factor(width)));       \
    }                                                                                              \
    ACLNN(name, .check = floating_first)

ONE_FACTOR(UpsampleNearest1dV2, at::upsample_nearest1d, float)
ONE_FACTOR(UpsampleNearestExact1d, at::_upsample_nearest_exact1d, double)
TWO_FACTORS(UpsampleNearest2dV2, at::upsample_nearest2d, float)
TWO_FACTORS(UpsampleNearestExact2d, at::_upsample_nearest_exact2d, double)
THREE_FACTORS(UpsampleNearest3d, at::upsample_nearest3d)
THREE_FACTORS(UpsampleNearestExact3d, at::_upsample_nearest_exact3d)
ALIGNED(UpsampleBilinear2d, at::upsample_bilinear2d)
ALIGNED(UpsampleBicubic2d, at::upsample_bicubic2d)
ALIGNED(UpsampleBilinear2dAA, at::_upsample_bilinear2d_aa)
ALIGNED(UpsampleBicubic2dAA, at::_upsample_bicubic2d_aa)

static void UpsampleLinear1d(In self, Ints size, bool aligned, double scale, Out out) {
    out.set(at::upsample_linear1d(widen(self), size.values, aligned, factor(scale)));
}
ACLNN(UpsampleLinear1d, .check = floating_first)
static void UpsampleTrilinear3d(In self, Ints size, bool aligned, double depth, double height, double width, Out out) {
    out.set(at::upsample_trilinear3d(widen(self), size.values, aligned, factor(depth), factor(height), factor(width)));
}
ACLNN(UpsampleTrilinear3d, .check = floating_first)

#define GRID(name, function)                                                                   \
    static void name(In input, In grid, int64_t mode, int64_t padding, bool aligned, Out out) { \
        out.set(function(widen(input), widen(grid), mode, padding, aligned));                   \
    }                                                                                           \
    ACLNN(name, .check = floating_first)
GRID(GridSampler2D, at::grid_sampler_2d)
GRID(GridSampler3D, at::grid_sampler_3d)
