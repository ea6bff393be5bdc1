#include "quantize.h"

namespace emulator {

namespace {

bool is_int4(const Out& output, int64_t width) {
    return output.dtype() == at::kInt && output.dim() > 0 && output.size(-1) * 8 == width;
}

}  // namespace

void store_quantized(const Out& output, const at::Tensor& values) {
    if (!output || values.numel() == 0) return;
    auto rounded = at::round(values.to(at::kFloat));
    switch (output.dtype()) {
        case at::kChar:
            return output.set(rounded.clamp(-128, 127));
        case at::kByte:
            return output.set(rounded.clamp(0, 255));
        case at::kInt:
            break;
        default:
            throw NotEmulated(std::string("quantization to ") + c10::toString(output.dtype()) + " is not emulated");
    }
    if (!is_int4(output, values.size(-1)))
        return output.set(rounded.to(at::kDouble).clamp(-2147483648.0, 2147483647.0));
    auto nibbles = rounded.clamp(-8, 7).to(at::kInt).bitwise_and(15).unflatten(-1, {values.size(-1) / 8, 8});
    auto packed = at::zeros(output.sizes(), at::kInt);
    for (int64_t i = 0; i < 8; ++i) packed.bitwise_or_(nibbles.select(-1, i).bitwise_left_shift(4 * i));
    output.set(packed);
}

at::Tensor unpack_int4(const at::Tensor& packed) {
    auto shifts = at::arange(28, -1, -4, at::kInt);  // shifts left, so that the right shift extends the sign
    auto nibbles = packed.unsqueeze(-1).bitwise_left_shift(shifts).bitwise_right_shift(at::full({}, 28, at::kInt));
    return nibbles.flatten(-2).to(at::kFloat);
}

bool is_packed_scale(const In& scale) { return scale.dtype() == at::kLong || scale.dtype() == at::kUInt64; }

at::Tensor scale_of(const at::Tensor& scale) {
    bool packed = scale.scalar_type() == at::kLong || scale.scalar_type() == at::kUInt64;
    if (!packed) return scale.to(at::kFloat);
    return scale.contiguous().view(at::kLong).to(at::kInt).view(at::kFloat);
}

at::Tensor offset_of(const at::Tensor& scale) {
    auto bits = scale.contiguous().view(at::kLong);
    return bits.bitwise_left_shift(at::full({}, 18, at::kLong))
        .bitwise_right_shift(at::full({}, 55, at::kLong))
        .to(at::kFloat);
}

at::Tensor integer_product(const at::Tensor& x1, const at::Tensor& x2) {
    constexpr int64_t kExact = 1024;  // 1024 * 128 * 128 fits into the 24 bits of float32's significand
    auto part = [&](int64_t begin, int64_t count) {
        return at::matmul(x1.narrow(-1, begin, count).to(at::kFloat), x2.narrow(-2, begin, count).to(at::kFloat));
    };
    int64_t inner = x1.size(-1);
    if (inner <= kExact) return part(0, inner);
    auto sums = part(0, kExact).to(at::kDouble);
    for (int64_t begin = kExact; begin < inner; begin += kExact)
        sums.add_(part(begin, std::min(kExact, inner - begin)));
    return sums;
}

double largest_quantized(const Out& output, int64_t width) { return is_int4(output, width) ? 7 : 127; }

void quantize_rows(const at::Tensor& values, const Out& output, const Out& scale) {
    auto wide = values.to(at::kFloat);
    auto scales = wide.abs().amax(-1, true) / largest_quantized(output, wide.size(-1));
    store_quantized(output, at::where(scales == 0, 0, wide / scales));
    scale.set(scales.squeeze(-1));
}

at::Tensor rows_by_group(const at::Tensor& factors, const at::Tensor& ends, int64_t rows) {
    auto group = at::searchsorted(ends.to(at::kLong), at::arange(rows, at::kLong), false, true);
    auto padded = at::constant_pad_nd(factors.to(at::kFloat), {0, 0, 0, 1}, 1);
    return padded.index_select(0, group.clamp(0, factors.size(0)));
}

}  // namespace emulator
