// Dropout masks and their application.
#include "numeric.h"
#include "philox.h"

using namespace emulator;

DOCUMENTED("ops-math: random (the page of each operation)");


// Draws a mask with one bit for each element: 1 keeps the element.
static void draw_mask(const Out& mask, int64_t count, double p, const Philox& numbers) {
    mask.set(drawn<uint8_t>({mask.size(0)}, [&](int64_t byte) {
        uint8_t bits = 0;
        for (int64_t i = byte * 8; i < std::min(byte * 8 + 8, count); ++i)
            bits |= (numbers.uniform(i) >= p) << (i - byte * 8);
        return bits;
    }));
}
static int64_t elements(const Ints& shape) {
    int64_t count = 1;
    for (auto size : shape.values) count *= size;
    return count;
}
static void DropoutGenMask(Ints shape, double p, SEEDED, Out mask) { draw_mask(mask, elements(shape), p, NUMBERS); }
ACLNN(DropoutGenMask, .check = [](Ints, double p, int64_t, int64_t, Out) { check_probability(p); })
static void DropoutGenMaskV2(Ints shape, double p, SEEDED, aclDataType, Out mask) {
    draw_mask(mask, elements(shape), p, NUMBERS);
}
ACLNN(DropoutGenMaskV2, .check = [](Ints, double p, int64_t, int64_t, aclDataType, Out) { check_probability(p); })
static void DropoutGenMaskV2Tensor(Ints shape, double p, SEEDED_ON_DEVICE, aclDataType, Out mask) {
    draw_mask(mask, elements(shape), p, NUMBERS_ON_DEVICE);
}
ACLNN(DropoutGenMaskV2Tensor)

static at::Tensor kept(const In& self, const In& mask, double p) {
    auto bits = mask.tensor().unsqueeze(-1).bitwise_right_shift(at::arange(8, at::kByte)).bitwise_and(1);
    auto keep = bits.reshape(-1).narrow(0, 0, self.tensor().numel()).reshape(self.sizes()).to(at::kBool);
    auto scaled = widen(self).div(1 - p);
    return at::where(keep, scaled, at::zeros({}, scaled.options()));
}
static void DropoutDoMask(In self, In mask, double p, Out out) { out.set(kept(self, mask, p)); }
ACLNN(
    DropoutDoMask, .check = [](In self, In, double p, Out out) {
        check_probability(p);
        require_shape(out, self.sizes(), "out");
    })
static void DropoutV3(In self, In, double p, SEEDED, Out out, Out mask) {
    draw_mask(mask, self.tensor().numel(), p, NUMBERS);
    out.set(kept(self, mask, p));
}
ACLNN(
    DropoutV3, .check = [](In, In noise_shape, double p, int64_t, int64_t, Out, Out) {
        if (noise_shape) throw NotEmulated("noise_shape is not emulated");
        check_probability(p);
    })
