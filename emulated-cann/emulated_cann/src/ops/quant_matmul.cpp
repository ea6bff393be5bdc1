// Matrix products of quantized tensors.
#include "quantize.h"

namespace {

using namespace emulator;


bool given(const In& tensor) {
    return tensor && tensor.sizes() != at::IntArrayRef{0};
}  // a tensor of shape [0] means none


// int4 is packed into int32 along the contiguous dimension.
at::Tensor wide_matrix(const In& matrix) {
    auto values = matrix.tensor();
    if (values.scalar_type() != at::kInt) return values;
    return is_transposed(matrix) ? unpack_int4(values.transpose(-1, -2)).transpose(-1, -2) : unpack_int4(values);
}

int64_t inner(const In& x1) { return x1.size(-1) * (x1.dtype() == at::kInt ? 8 : 1); }

// Returns whether the product has int8 activations and int4 weights.
bool is_mixed(const In& x1, const In& x2) { return x1.dtype() == at::kChar && x2.dtype() == at::kInt; }

constexpr int64_t kMixedGroup = 256, kMixedInner = 29576;

DOCUMENTED("ops-nn: matmul/quant_batch_matmul_v4/docs/aclnnQuantMatmulV5.md");
// See aclnnQuantMatmulV5.md of ops-nn, "K-C" and "K-G", INT8 with INT32 (CANN 8.5 to 9.1, only on A2 and A3), and its
// op_host/op_api/aclnn_quant_matmul_v5.cpp, CheckParamsA8W4Int.
void check_mixed_product(In x1, In x2, In row_scale, In scale, In offset, In y_offset, In bias, int64_t group_size,
                         Out out) {
    if (!soc_name().starts_with("Ascend910"))
        throw Refused("int8 x1 with int4 x2 in int32 requires Atlas A2 or A3, but the SoC is " + soc_name());
    if (x1.dim() != 2 || x2.dim() != 2)
        throw Refused("with int8 x1 and int4 x2, both must have 2 dimensions, not " + number(x1.dim()) + " and " +
                      number(x2.dim()));
    if (is_transposed(x2))
        throw Refused("with int8 x1 and int4 x2, x2 must have shape [K, N / 8] and not be transposed");
    int64_t rows = x1.size(0), inner = x1.size(1), columns = 8 * x2.size(1);
    bool grouped = scale.dim() == 2;
    if (x2.size(0) != inner)
        throw Refused("x1 must have as many columns as x2 has rows, " + number(x2.size(0)) + ", but has " +
                      number(inner));
    if (inner > kMixedInner || inner % (grouped ? kMixedGroup : 2))
        throw Refused("with int8 x1 and int4 x2, K must be at most 29576 and a multiple of " +
                      number(grouped ? kMixedGroup : 2) + ", but is " + number(inner));
    if (group_size != (grouped ? kMixedGroup : 0))
        throw Refused(
            "group_sizes must be [0, 0, 256] with a scale of 2 dimensions, and omitted with a scale of 1 dimension");
    if (!is_packed_scale(scale))
        throw Refused("with int8 x1 and int4 x2, scale must be the int64 output of TransQuantParam, not " +
                      text(scale.dtype()));
    std::vector<int64_t> scales{columns}, row_scales{rows};
    if (grouped) scales.insert(scales.begin(), inner / kMixedGroup), row_scales.push_back(1);
    if (scale.sizes() != at::IntArrayRef(scales))
        throw Refused("scale must have shape [N], or [K / 256, N] for groups of 256 rows, with K = " + number(inner) +
                      " and N = " + number(columns) + ", not " + c10::str(scale.sizes()));
    if (!given(row_scale) || row_scale.dtype() != at::kFloat || row_scale.sizes() != at::IntArrayRef(row_scales))
        throw Refused("pertoken_scale must be float32 of shape [M], or [M, 1] with a scale of 2 dimensions");
    if (!given(y_offset) || y_offset.dtype() != at::kFloat || y_offset.sizes() != at::IntArrayRef{columns})
        throw Refused("with int8 x1 and int4 x2, offset must be float32 of shape [N]");
    if (given(bias) || given(offset)) throw Refused("bias must be omitted with int8 x1 and int4 x2");
    if (out.dtype() != at::kHalf && out.dtype() != at::kBFloat16)
        throw Refused("with int8 x1 and int4 x2, out must be float16 or bfloat16, not " + text(out.dtype()));
}

// The kernel splits each int8 into 16 * high + (low - 8) + 8, and expects y_offset to add the last 8, as 8 times the
// sum of the scaled weights. See the operation's op_kernel/quant_batch_matmul_v4_msd.h.
at::Tensor mixed_product(const In& x1, const In& x2, const In& row_scale, const In& scale, const In& y_offset) {
    auto factors = scale_of(scale);
    if (factors.dim() == 2) factors = factors.repeat_interleave(kMixedGroup, 0);
    auto weights = wide_matrix(x2).to(at::kFloat) * factors;
    auto values = at::matmul(x1.tensor().to(at::kFloat) - 8, weights) + y_offset.tensor();
    return values * row_scale.tensor().view({-1, 1});
}

DOCUMENTED(
    "ops-nn: matmul/quant_batch_matmul_v4/docs/aclnnQuantMatmulV5.md"
    "; ops-nn: matmul/quant_batch_matmul_v3/docs/aclnnQuantMatmulV4.md"
    "; ops-nn: matmul/quant_batch_matmul_v3/docs/aclnnQuantMatmulWeightNz.md");
void check_product(In x1, In x2, In row_scale, In scale, In y_scale, In x1_offset, In offset, In y_offset, In bias,
                   bool transpose1, bool transpose2, int64_t group_size, Out out) {
    bool int8 = x1.dtype() == at::kChar && x2.dtype() == at::kChar,
         int4 = x1.dtype() == at::kInt && x2.dtype() == at::kInt;
    if (transpose1 || transpose2)
        throw NotEmulated("the flags transposeX1 and transposeX2 are not emulated; transposed views are");
    if (given(y_scale) || given(x1_offset)) throw NotEmulated("y_scale and x1_offset are not emulated");
    if (is_mixed(x1, x2)) return check_mixed_product(x1, x2, row_scale, scale, offset, y_offset, bias, group_size, out);
    if (!int8 && !int4)
        throw Refused("x1 and x2 must both be int8, both int4 in int32, or int8 and int4 in int32, not " +
                      text(x1.dtype()) + " and " + text(x2.dtype()));
    if (x1.dim() < 2 || x1.dim() > 6 || x2.dim() < 2 || x2.dim() > 6)
        throw Refused("x1 and x2 must have 2 to 6 dimensions, not " + number(x1.dim()) + " and " + number(x2.dim()));
    if (group_size) throw NotEmulated("group_sizes without int8 x1 and int4 x2 is not emulated");
    if (given(y_offset)) throw Refused("y_offset is allowed only with int8 x1 and int4 x2");
    int64_t rows = x2.size(-2) * (int4 && is_transposed(x2) ? 8 : 1), columns = out.size(-1);
    if (inner(x1) != rows)
        throw Refused("x1 must have as many columns as x2 has rows, " + number(rows) + ", but has " +
                      number(inner(x1)));
    bool any_size = int8 && !is_packed_scale(scale) && scale.dim() == 1 && given(row_scale) && row_scale.dim() == 1;
    if (!any_size && (x1.size(-1) > 65535 || x2.size(-1) > 65535))
        throw Refused("the last dimensions of x1 and x2 must be at most 65535, but are " + number(x1.size(-1)) +
                      " and " + number(x2.size(-1)));
    int64_t scales = 1;
    for (auto size : scale.sizes()) scales *= size;
    if (scales != 1 && scales != columns)
        throw Refused("scale must have 1 element or N = " + number(columns) + ", not " + number(scales));
    bool bf16 = out.dtype() == at::kBFloat16, fp16 = out.dtype() == at::kHalf;
    bool int32 = out.dtype() == at::kInt;
    if (!bf16 && !fp16 && !int32 && out.dtype() != at::kChar)
        throw Refused("the output must be int8, int32, float16 or bfloat16, not " + text(out.dtype()));
    bool rows_scaled = given(row_scale);
    if (rows_scaled && (row_scale.dtype() != at::kFloat || row_scale.dim() != 1 || row_scale.size(0) != x1.size(-2)))
        throw Refused("pertoken_scale must be float32 of shape [M], not " +
                      c10::str(row_scale.dtype(), " of shape ", row_scale.sizes()));
    if (rows_scaled && !bf16 && !fp16)
        throw Refused("pertoken_scale requires a float16 or bfloat16 output, not " + text(out.dtype()));
    bool plain = scale.dtype() == at::kFloat || scale.dtype() == at::kBFloat16;
    if (int32) {
        if (!plain || given(offset) || (given(bias) && bias.dtype() != at::kInt))
            throw Refused(
                "an int32 output requires a float32 or bfloat16 scale, no bias or an int32 bias, and no offset");
        return;
    }
    if (bf16 && !plain)
        throw Refused("a bfloat16 output requires a float32 or bfloat16 scale, not " + text(scale.dtype()));
    if (fp16 && rows_scaled && scale.dtype() != at::kFloat)
        throw Refused("a float16 output with pertoken_scale requires a float32 scale, not " + text(scale.dtype()));
    if (!bf16 && !rows_scaled && !is_packed_scale(scale))
        throw Refused("a " + text(out.dtype()) +
                      " output without pertoken_scale requires the int64 scale of TransQuantParam, not " +
                      text(scale.dtype()));
    if (given(offset) && (out.dtype() != at::kChar || offset.dtype() != at::kFloat))
        throw Refused("offset must be float32 and requires an int8 output, but they are " + text(offset.dtype()) +
                      " and " + text(out.dtype()));
    if (!given(bias)) return;
    if (bias.size(-1) != columns)
        throw Refused("the last dimension of bias must be N = " + number(columns) + ", but is " +
                      number(bias.size(-1)));
    if (bias.dtype() != at::kInt && !(bf16 || rows_scaled))
        throw Refused("bias must be int32 with a " + text(out.dtype()) + " output without pertoken_scale, not " +
                      text(bias.dtype()));
    if (bias.dtype() != at::kInt && bias.dtype() != at::kFloat && bias.dtype() != out.dtype())
        throw Refused("bias must be int32, float32 or have the output's dtype, " + text(out.dtype()) + ", not " +
                      text(bias.dtype()));
}

double count_product(In x1, In x2, In, In, In, In, In, In, In, bool, bool, int64_t, Out out) {
    double flops = 2.0 * inner(x1);
    for (auto size : out.sizes()) flops *= size;
    return flops;
}

void QuantMatmulV5(In x1, In x2, In row_scale, In scale, In y_scale, In x1_offset, In offset, In y_offset, In bias,
                   bool transpose1, bool transpose2, int64_t group_size, Out out) {
    if (is_mixed(x1, x2)) return out.set(mixed_product(x1, x2, row_scale, scale, y_offset));
    auto sums = integer_product(wide_matrix(x1), wide_matrix(x2));
    bool integer_bias = given(bias) && bias.dtype() == at::kInt;
    if (integer_bias) sums = sums + bias.tensor();
    if (out.dtype() == at::kInt) return out.set(sums);  // the scale has no effect
    auto values = sums.to(at::kFloat) * scale_of(scale).view(-1);
    if (given(row_scale)) values = values * row_scale.tensor().unsqueeze(-1);
    if (given(bias) && !integer_bias) values = values + bias.tensor().to(at::kFloat);
    if (out.dtype() != at::kChar) return out.set(values);
    if (given(offset))
        values = values + offset.tensor();
    else if (is_packed_scale(scale))
        values = values + offset_of(scale).view(-1);
    store_quantized(out, values);
}

void QuantMatmulWeightNz(In x1, In x2, In row_scale, In scale, In y_scale, In x1_offset, In offset, In y_offset,
                         In bias, bool transpose1, bool transpose2, int64_t group_size, Out out) {
    QuantMatmulV5(x1, x2, row_scale, scale, y_scale, x1_offset, offset, y_offset, bias, transpose1, transpose2,
                  group_size, out);
}

DOCUMENTED("ops-nn: matmul/quant_batch_matmul_v3/docs/aclnnQuantMatmulWeightNz.md");
void check_nz_product(In x1, In x2, In row_scale, In scale, In y_scale, In x1_offset, In offset, In y_offset, In bias,
                      bool transpose1, bool transpose2, int64_t group_size, Out out) {
    if (x2.dtype() == at::kInt) throw NotEmulated("int4 weights in FRACTAL_NZ are not emulated");
    if (x2.size(-1) == 1 || x2.size(-2) == 1)
        throw Refused("x2 in FRACTAL_NZ must have no dimension of size 1, but has shape " + c10::str(x2.sizes()));
    check_product(x1, x2, row_scale, scale, y_scale, x1_offset, offset, y_offset, bias, transpose1, transpose2,
                  group_size, out);
}

DOCUMENTED(
    "ops-nn: quant/trans_quant_param_v2/docs/aclnnTransQuantParamV2.md"
    "; ops-nn: quant/trans_quant_param_v2/docs/aclnnTransQuantParamV3.md");
void check_param(In scale, In offset, int64_t round_mode, Out out) {
    if (scale.dtype() != at::kFloat || (offset && offset.dtype() != at::kFloat))
        throw Refused("scale and offset must be float32, but scale is " + text(scale.dtype()) +
                      (offset ? " and offset " + text(offset.dtype()) : ""));
    if (scale.dim() < 1 || scale.dim() > 2)
        throw Refused("scale must have 1 or 2 dimensions, not " + number(scale.dim()));
    if (round_mode != 0 && round_mode != 1) throw Refused("round_mode must be 0 or 1, but is " + number(round_mode));
    if (!is_packed_scale(out)) throw Refused("out must be int64 or uint64, not " + text(out.dtype()));
}

void TransQuantParamV3(In scale, In offset, int64_t round_mode, Out out) {
    auto bits = scale.tensor().contiguous().view(at::kInt).to(at::kLong).bitwise_and(0xFFFFFFFF);
    if (round_mode == 1) bits = bits + 0xFFF + bits.bitwise_right_shift(at::full({}, 13, at::kLong)).bitwise_and(1);
    auto packed = bits.bitwise_and(0xFFFFE000).bitwise_or(int64_t{1} << 46);
    if (offset) {
        auto whole = at::round(offset.tensor()).clamp(-256, 255).to(at::kLong).bitwise_and(0x1FF);
        packed = packed.bitwise_or(whole.bitwise_left_shift(at::full({}, 37, at::kLong)));
    }
    out.raw().view(at::kLong).copy_(packed);
}

void check_param_v2(In scale, In offset, Out out) { check_param(scale, offset, 0, out); }
void TransQuantParamV2(In scale, In offset, Out out) { TransQuantParamV3(scale, offset, 0, out); }

}  // namespace

ACLNN(QuantMatmulV5, .check = check_product, .flops = count_product)
ACLNN(QuantMatmulWeightNz, .check = check_nz_product, .flops = count_product)
ACLNN(TransQuantParamV3, .check = check_param)
ACLNN(TransQuantParamV2, .check = check_param_v2)
