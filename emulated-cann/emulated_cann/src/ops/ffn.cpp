// Two products with an activation in between, for all rows or for the rows of each expert.
#include "numeric.h"
#include "quantize.h"

namespace {

using namespace emulator;

constexpr size_t kMostExperts = 256;
constexpr int64_t kMostWidth = 65535;

// The factors and offsets of a product's weight and result; each may be null.
struct Scales {
    In bias, result, weight, weight_offset;
};

at::Tensor activate(const at::Tensor& x, const std::string& name) {
    if (name == "relu") return at::relu(x);
    if (name == "silu") return at::silu(x);
    if (name == "gelu") return at::gelu(x, "tanh");
    return x * at::sigmoid(1.702 * x);  // fastgelu
}

// That of an expert, of a tensor that has a row for each, or the tensor itself without experts.
at::Tensor of(const In& tensor, int64_t expert, bool experts) {
    return experts ? tensor.tensor()[expert] : tensor.tensor();
}

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_ffn.md");
void check_ffn(In x, In weight1, In weight2, Ints tokens, In bias1, In bias2, In scale, In offset, In result1,
               In result2, In weight_scale1, In weight_scale2, In weight_offset1, In weight_offset2, Text activation,
               int64_t precise, bool, Out y) {
    const auto& name = activation.value;
    if (name == "geglu" || name == "swiglu" || name == "reglu")
        throw NotEmulated("the activation " + name + " is not emulated; fastgelu, gelu, relu and silu are");
    require(name == "fastgelu" || name == "gelu" || name == "relu" || name == "silu",
            "activation must be fastgelu, gelu, relu, silu, geglu, swiglu or reglu, not " + name);
    require_dtype(x, {at::kHalf, at::kBFloat16, at::kChar}, "x");
    require(weight1.dtype() == weight2.dtype() && (weight1.dtype() == x.dtype() || weight1.dtype() == at::kChar),
            "weight1 and weight2 must have the dtype of x, or be int8");
    require(tokens.size() <= kMostExperts, "there may be at most 256 experts, not " + std::to_string(tokens.size()));
    bool experts = tokens.size() > 0;
    int64_t count = experts ? weight1.size(0) : 0, width = x.size(-1), middle = weight1.size(-1);
    auto with_experts = [&](std::vector<int64_t> shape) {
        if (experts) shape.insert(shape.begin(), count);
        return shape;
    };
    require(!experts || int64_t(tokens.size()) == count,
            "expert_tokens must have a number for each of the " + std::to_string(count) + " experts");
    require_shape(weight1, with_experts({width, middle}), "weight1");
    require_shape(weight2, with_experts({middle, width}), "weight2");
    require(width <= kMostWidth && middle <= kMostWidth, "K1 and K2 must be less than 65536");
    for (const In* each : {&bias1, &result1, &weight_scale1, &weight_offset1})
        require_shape(*each, with_experts({middle}), "biases and scales of the first product");
    for (const In* each : {&bias2, &result2, &weight_scale2, &weight_offset2})
        require_shape(*each, with_experts({width}), "biases and scales of the second product");
    bool quantized = x.dtype() == at::kChar, weights_only = !quantized && weight1.dtype() == at::kChar;
    require(quantized == (scale && result1 && result2),
            "int8 x requires scale, deq_scale1 and deq_scale2, other x none");
    require(weights_only == (weight_scale1 && weight_scale2),
            "int8 weights of other x require antiquant_scale1 and antiquant_scale2, others none");
    require(precise == 0 || (precise == 1 && (x.dtype() == at::kHalf || quantized || weights_only)),
            "inner_precise must be 0, or 1 with float16 or int8, but is " + std::to_string(precise));
    require_shape(y, x.sizes(), "y");
}

void FFNV2(In x, In weight1, In weight2, Ints tokens, In bias1, In bias2, In scale, In offset, In result1, In result2,
           In weight_scale1, In weight_scale2, In weight_offset1, In weight_offset2, Text activation, int64_t,
           bool ends, Out y) {
    auto rows = x.tensor().reshape({-1, x.size(-1)});
    bool experts = tokens.size() > 0, quantized = x.dtype() == at::kChar;
    auto product = [&](const at::Tensor& from, const In& weight, const Scales& with, int64_t expert) {
        auto matrix = of(weight, expert, experts), factors = at::Tensor();
        if (with.weight) {
            matrix = matrix.to(at::kFloat);
            if (with.weight_offset) matrix = matrix + of(with.weight_offset, expert, experts).to(at::kFloat);
            matrix = matrix * of(with.weight, expert, experts).to(at::kFloat);
        }
        auto found = quantized ? integer_product(from, matrix)
                               : at::matmul(from.to(at::kFloat), matrix.to(at::kFloat));
        if (with.bias) found = found + of(with.bias, expert, experts).to(found.scalar_type());
        found = found.to(at::kFloat);
        return with.result ? found * scale_of(of(with.result, expert, experts)) : found;
    };
    auto all = at::empty(rows.sizes(), at::kFloat);
    int64_t start = 0, groups = experts ? int64_t(tokens.size()) : 1;
    for (int64_t expert = 0; expert < groups; ++expert) {
        int64_t end = !experts ? rows.size(0) : ends ? tokens[expert] : start + tokens[expert];
        UNDEFINED("the documents require that the experts' tokens are the rows of x");
        if (end < start || end > rows.size(0) || (experts && expert + 1 == groups && end != rows.size(0)))
            throw std::runtime_error("expert_tokens must sum to the " + std::to_string(rows.size(0)) + " rows of x");
        auto middle = activate(product(rows.narrow(0, start, end - start), weight1,
                                       {bias1, result1, weight_scale1, weight_offset1}, expert),
                               activation.value);
        if (quantized) {
            middle = middle * of(scale, expert, experts);
            if (offset) middle = middle + of(offset, expert, experts);
            middle = middle.round().clamp(-128, 127);
        } else {
            middle = middle.to(x.dtype());
        }
        all.narrow(0, start, end - start)
            .copy_(product(middle, weight2, {bias2, result2, weight_scale2, weight_offset2}, expert));
        start = end;
    }
    y.set(all.reshape(y.sizes()));
}

}  // namespace

ACLNN(FFNV2, .check = check_ffn)
