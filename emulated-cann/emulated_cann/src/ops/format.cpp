// Casts between ND and FRACTAL_NZ. In::tensor and Out::set convert, because each tensor knows its format.
#include "numeric.h"

using namespace emulator;

DOCUMENTED("ops-math: conversion/npu_format_cast/docs/aclnnNpuFormatCast.md");

static void check(In self, Out out) {
    require_dtype(self, {at::kHalf, at::kBFloat16, at::kFloat, at::kChar, at::kByte, at::kInt, at::kUInt32}, "self");
    require_shape(out, self.sizes(), "out");
    require(self.dtype() == out.dtype(),
            "a format cast must not change the dtype, but self is " + c10::str(self.dtype(), " and out ", out.dtype()));
    bool is_private = self.format() == ACL_FORMAT_FRACTAL_NZ || self.format() == ACL_FORMAT_FRACTAL_NZ_C0_16 ||
                      self.format() == ACL_FORMAT_FRACTAL_NZ_C0_32;
    // torch_npu's npu_format_cast_(self, source) passes self as source and destination.
    DOCUMENTED("pytorch: torch_npu/csrc/aten/common/FormatCastKernelNpu.cpp");
    require(!is_private || self.format() != out.format(),
            "self must not be in FRACTAL_NZ already, because torch_npu's copy_ into such a tensor drops the source; "
            "load in ND and cast afterwards");
}
static void NpuFormatCast(In self, Out out) { out.set(self); }
ACLNN(NpuFormatCast, .check = check)

// Computes the shape of the storage in the requested format. The caller frees it with delete[].
extern "C" int aclnnNpuFormatCastCalculateSizeAndFormat(const aclTensor* self, int format, int additional_dtype,
                                                        int64_t** shape, uint64_t* dims, int* actual_format) {
    const char* name = "aclnnNpuFormatCastCalculateSizeAndFormat: ";
    if (!self || !shape || !dims || !actual_format) return fail(161001, std::string(name) + "an argument is null");
    size_t count = self->shape.size();
    if (count < 2 || count > 6)
        return fail(161002, std::string(name) + "self must have 2 to 6 dimensions, but has " + std::to_string(count));
    std::vector<int64_t> result = self->shape;
    if (format == ACL_FORMAT_FRACTAL_NZ) {
        auto dtype = additional_dtype == -1 ? self->dtype : static_cast<aclDataType>(additional_dtype);
        int64_t columns = 32 / c10::elementSize(scalar_type(dtype));  // a tile's row is 32 bytes
        int64_t m = result[count - 2], n = result[count - 1];
        result.resize(count - 2);
        result.insert(result.end(), {(n + columns - 1) / columns, (m + 15) / 16, 16, columns});
    } else if (format != ACL_FORMAT_ND && format != ACL_FORMAT_NCL && format != ACL_FORMAT_NCHW &&
               format != ACL_FORMAT_NCDHW) {
        OURS("not emulated");
        return fail(361001, name + std::string("format ") + std::to_string(format) + " is not emulated");
    }
    *shape = new int64_t[result.size()];
    std::copy(result.begin(), result.end(), *shape);
    *dims = result.size();
    *actual_format = format;
    return 0;
}
