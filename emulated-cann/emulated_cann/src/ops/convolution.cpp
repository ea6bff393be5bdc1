// Convolutions with one, two or three spatial dimensions.
#include "numeric.h"

using namespace emulator;

DOCUMENTED("ops-nn: conv/convolution_forward/docs/aclnnConvolution.md");

static void check_convolution(In input, In weight, In bias, Ints stride, Ints, Ints dilation, bool transposed, Ints,
                              int64_t groups, Out, int8_t) {
    require_dtype(input, {at::kFloat, at::kHalf, at::kBFloat16}, "input");
    require_dtype(weight, {input.dtype()}, "weight");
    require(input.dim() == weight.dim() && input.dim() >= 3,
            "input and weight must have the same number of dimensions, at least 3, but have shapes " +
                shown(input.sizes()) + " and " + shown(weight.sizes()));
    require(groups > 0, "groups must be positive, but is " + std::to_string(groups));
    require(input.size(1) == (transposed ? weight.size(0) : weight.size(1) * groups),
            "input must have as many channels as weight requires with groups " + std::to_string(groups) +
                ", but they have shapes " + shown(input.sizes()) + " and " + shown(weight.sizes()));
    require(int64_t(stride.size()) == input.dim() - 2 && int64_t(dilation.size()) == input.dim() - 2,
            "stride and dilation must have one value for each of the " + std::to_string(input.dim() - 2) +
                " spatial dimensions, but have " + std::to_string(stride.size()) + " and " +
                std::to_string(dilation.size()));
    if (bias) require(bias.dim() == 1, "bias must have one dimension, but has shape " + shown(bias.sizes()));
}
static double convolution_flops(In, In weight, In, Ints, Ints, Ints, bool transposed, Ints, int64_t, Out out, int8_t) {
    double products = 2;
    for (auto size : out.sizes()) products *= size;
    for (int64_t d = transposed ? 2 : 1; d < weight.dim(); ++d) products *= weight.size(d);
    return products;
}
static void Convolution(In input, In weight, In bias, Ints stride, Ints padding, Ints dilation, bool transposed,
                        Ints output_padding, int64_t groups, Out out, int8_t) {
    auto x = widen(input);
    auto pads = padding.values;
    size_t spatial = x.dim() - 2;
    if (pads.size() == 2 * spatial) {  // separate padding at each end
        std::vector<int64_t> last_to_first;
        for (size_t d = spatial; d-- > 0;) last_to_first.insert(last_to_first.end(), {pads[2 * d], pads[2 * d + 1]});
        x = at::constant_pad_nd(x, last_to_first);
        pads.assign(spatial, 0);
    }
    std::optional<at::Tensor> added = bias ? std::optional<at::Tensor>(widen(bias)) : std::nullopt;
    out.set(at::convolution(x, widen(weight), added, stride.values, pads, dilation.values, transposed,
                            output_padding.values, groups));
}
ACLNN(Convolution, .check = check_convolution, .flops = convolution_flops)
