// ATB's product with accumulation, rotary embedding, quantized norm, quantization and choice of groups of experts.
#include <functional>
#include <vector>

#include "operation.h"
#include "ops/norm.h"
#include "ops/numeric.h"
#include "ops/quantize.h"
#include "ops/rope.h"

namespace atb {

namespace infer {
struct LinearParam {
    bool transpose_x, transpose_weight, bias;
    aclDataType output_dtype;
    bool accumulates;
    uint8_t reserved[23];
};
struct RopeParam {
    int32_t coefficient;  // 2: halves are rotated; the head dimension: pairs
    int32_t format;
    uint8_t reserved[8];
};
struct GroupTopkParam {
    int32_t groups, kept;
    uint16_t sums;  // 0: a group's score is its largest element; 1: the sum of the `summed` largest
    uint16_t summed;
    uint8_t reserved[12];
};
struct ElewiseParam {
    int kind;
    struct {
        float scale;
        bool asymmetric;
        int offset;
        uint8_t reserved[20];
    } quantization;
    struct {
        float factor;
        uint8_t reserved[12];
    } product;
    aclDataType output_dtype;
    uint8_t reserved[8];
};
struct RmsNormParam {
    int kind;  // 1: the norm alone
    struct {
        int quantized;  // 2: to int8
        float epsilon;
        double layer_norm_epsilon;
        bool wants_rstd;
        int precision, gemma, dynamic;
        uint8_t reserved[32];
    } norm;
    uint8_t others[2 * 32 + 8];  // of norms with a sum
};
}  // namespace infer

namespace {

using namespace emulator;

constexpr int kQuantize = 17;

// An operation on whole tensors. Outputs may be inputs.
class Plain : public EmulatedOperation {
  public:
    using Body = std::function<void(const std::vector<In>&, const std::vector<InOut>&)>;
    Plain(std::string name, uint32_t inputs, uint32_t outputs, Body check, Body run)
        : EmulatedOperation(std::move(name), inputs, outputs, 0), check_(std::move(check)), run_(std::move(run)) {}

  private:
    Launch bind(const VariantPack& pack) const override {
        std::vector<In> inputs;
        std::vector<InOut> outputs;
        for (size_t i = 0; i < pack.inputs.size; ++i) {
            auto handle = handle_of(pack.inputs[i]);
            inputs.emplace_back(&handle);
        }
        for (size_t i = 0; i < pack.outputs.size; ++i) {
            auto handle = handle_of(pack.outputs[i]);
            outputs.emplace_back(&handle);
        }
        check_(inputs, outputs);
        Launch launch;
        for (auto& each : inputs) each.describe(launch.operands);
        for (auto& each : outputs) static_cast<const Out&>(each).describe(launch.operands);
        launch.run = [inputs, outputs, run = run_] { run(inputs, outputs); };
        return launch;
    }

    Body check_, run_;
};

}  // namespace

DOCUMENTED("hiascend: zh/canncommercial/900/API/ascendtb/ascendtb_01_0164.html");
template <>
Status CreateOperation<infer::LinearParam>(const infer::LinearParam& given, Operation** operation) {
    if (!given.accumulates || given.bias || given.output_dtype != ACL_DT_UNDEFINED)
        throw NotEmulated("ATB's LinearOperation other than a product that is added to its output is not emulated");
    auto turned = [](const at::Tensor& matrix, bool transposed) { return transposed ? matrix.mT() : matrix; };
    auto check = [given, turned](const std::vector<In>& in, const std::vector<InOut>& out) {
        require_dtype(in[0], {at::kHalf, at::kBFloat16}, "x");
        require(in[1].dtype() == in[0].dtype(), "weight must have the dtype of x");
        require_dtype(in[2], {at::kFloat}, "the accumulator");
        require(in[0].dim() == in[1].dim() && (in[0].dim() == 2 || in[0].dim() == 3) &&
                    (in[0].dim() == 2 || in[0].size(0) == in[1].size(0)),
                "x and weight must be matrices, or batches of as many, but have shapes " + shown(in[0].sizes()) +
                    " and " + shown(in[1].sizes()));
        auto x = turned(in[0].raw(), given.transpose_x), weight = turned(in[1].raw(), given.transpose_weight);
        require(x.size(-1) == weight.size(-2), "the inner dimensions of x and weight must be the same, but are " +
                                                   std::to_string(x.size(-1)) + " and " +
                                                   std::to_string(weight.size(-2)));
        auto shape = x.sizes().vec();
        shape.back() = weight.size(-1);
        require_shape(in[2], shape, "the accumulator");
    };
    auto run = [given, turned](const std::vector<In>& in, const std::vector<InOut>& out) {
        auto x = turned(in[0].raw(), given.transpose_x), weight = turned(in[1].raw(), given.transpose_weight);
        out[0].set(in[2].raw() + at::matmul(x.to(at::kFloat), weight.to(at::kFloat)));
    };
    *operation = new Plain("LinearOperation", 3, 1, check, run);
    return 0;
}

DOCUMENTED("hiascend: zh/CANNCommunityEdition/82RC1alpha002/API/ascendtbapi/ascendtb_01_0075.html");
template <>
Status CreateOperation<infer::RopeParam>(const infer::RopeParam& given, Operation** operation) {
    auto check = [given](const std::vector<In>& in, const std::vector<InOut>& out) {
        int64_t dim = in[2].size(-1), tokens = in[0].size(0);
        if (given.format || (given.coefficient != 2 && given.coefficient != dim))
            throw NotEmulated("ATB's RopeOperation with rotaryCoeff " + std::to_string(given.coefficient) +
                              " and a head dimension of " + std::to_string(dim) + " is not emulated");
        for (int i : {0, 1}) {
            require_dtype(in[i], {at::kHalf, at::kBFloat16}, "query and key");
            require(in[i].dtype() == in[0].dtype() && in[i].dim() >= 2 && in[i].size(0) == tokens,
                    "query and key must have the same dtype and number of tokens");
            require(in[i].raw().numel() % (std::max<int64_t>(1, tokens) * dim) == 0,
                    "query and key must have whole heads of " + std::to_string(dim) +
                        " elements, but one has shape " + shown(in[i].sizes()));
        }
        require(in[0].raw().numel() % std::max<int64_t>(1, in[1].raw().numel()) == 0,
                "the width of query must be a multiple of the key's");
        for (int i : {2, 3}) {
            require_dtype(in[i], {at::kHalf, at::kBFloat16, at::kFloat}, "cos and sin");
            require_shape(in[i], {tokens, dim}, "cos and sin");
        }
        require_dtype(in[4], {at::kInt}, "seqlen");
    };
    auto run = [given](const std::vector<In>& in, const std::vector<InOut>& out) {
        auto cos = in[2].raw().unsqueeze(1), sin = in[3].raw().unsqueeze(1);
        for (int i : {0, 1}) {
            auto rows = in[i].raw().reshape({in[i].size(0), -1, in[2].size(-1)});
            out[i].set(rotate(rows, cos, sin, given.coefficient != 2).reshape(out[i].sizes()));
        }
    };
    *operation = new Plain("RopeOperation", 5, 2, check, run);
    return 0;
}

DOCUMENTED("op-plugin: op_plugin/python/atb/_atb_api_docs.py");
template <>
Status CreateOperation<infer::RmsNormParam>(const infer::RmsNormParam& given, Operation** operation) {
    if (given.kind != 1 || given.norm.quantized != 2 || given.norm.wants_rstd || given.norm.dynamic || given.norm.gemma)
        throw NotEmulated("ATB's RmsNormOperation other than the norm with quantization to int8 is not emulated");
    auto check = [](const std::vector<In>& in, const std::vector<InOut>& out) {
        require_dtype(in[0], {at::kHalf, at::kBFloat16}, "x");
        for (int i : {1, 2})
            require(in[i].dtype() == in[0].dtype() && in[i].raw().numel() == in[0].size(-1),
                    "gamma and beta must have the dtype of x, and an element for each of its last dimension");
        require(in[3].dtype() == in[0].dtype() && in[3].raw().numel() == 1,
                "scale must have one element of the dtype of x");
        require_dtype(in[4], {at::kChar}, "offset");
        require(in[4].raw().numel() == 1, "offset must have one element");
        require_dtype(out[0], {at::kChar}, "output");
        require_shape(out[0], in[0].sizes(), "output");
    };
    auto run = [epsilon = given.norm.epsilon](const std::vector<In>& in, const std::vector<InOut>& out) {
        auto normalized = rms_normalize(in[0].raw(), in[1].raw().reshape(-1), epsilon, in[2].raw().reshape(-1));
        auto scale = in[3].raw().reshape(-1).to(at::kFloat), offset = in[4].raw().reshape(-1).to(at::kFloat);
        store_quantized(out[0], normalized.values / scale + offset);
    };
    *operation = new Plain("RmsNormOperation", 5, 1, check, run);
    return 0;
}

template <>
Status CreateOperation<infer::ElewiseParam>(const infer::ElewiseParam& given, Operation** operation) {
    if (given.kind != kQuantize)
        throw NotEmulated("ATB's ElewiseOperation other than the quantization by channel is not emulated");
    auto check = [](const std::vector<In>& in, const std::vector<InOut>& out) {
        require_dtype(in[0], {at::kHalf, at::kBFloat16}, "x");
        require(in[1].dtype() == in[0].dtype(), "scale must have the dtype of x");
        require_dtype(in[2], {at::kChar}, "zero_point");
        require_dtype(out[0], {at::kChar}, "y");
        require_shape(out[0], in[0].sizes(), "y");
        for (int i : {1, 2})
            require(in[i].raw().numel() == 0 || broadcast(in[i].sizes(), in[0].sizes()) == in[0].sizes(),
                    "scale and zero_point must broadcast to the shape of x, " + shown(in[0].sizes()) +
                        ", but one has shape " + shown(in[i].sizes()));
    };
    auto run = [](const std::vector<In>& in, const std::vector<InOut>& out) {
        auto values = (in[0].raw().to(at::kFloat) / in[1].raw().to(at::kFloat)).round();
        if (in[2].raw().numel()) values = values + in[2].raw().to(at::kFloat);
        store_quantized(out[0], values);
    };
    *operation = new Plain("ElewiseOperation", 3, 1, check, run);
    return 0;
}

DOCUMENTED("op-plugin: op_plugin/ops/atb/GroupTopkAtb.cpp");
template <>
Status CreateOperation<infer::GroupTopkParam>(const infer::GroupTopkParam& given, Operation** operation) {
    auto check = [given](const std::vector<In>& in, const std::vector<InOut>& out) {
        require_dtype(in[0], {at::kHalf, at::kBFloat16}, "self");
        require(in[0].dim() == 2 && given.groups >= 1 && in[0].size(1) % given.groups == 0,
                "self must have shape [tokens, experts] with groups of the same size, but has shape " +
                    shown(in[0].sizes()) + " for " + std::to_string(given.groups) + " groups");
        require(given.kept >= 1 && given.kept <= given.groups,
                "k must be between 1 and the number of groups, " + std::to_string(given.groups) + ", but is " +
                    std::to_string(given.kept));
        require(given.summed >= 1 && given.summed <= in[0].size(1) / given.groups,
                "n must be between 1 and the size of a group, but is " + std::to_string(given.summed));
    };
    auto run = [given](const std::vector<In>& in, const std::vector<InOut>& out) {
        auto grouped = in[0].raw().unflatten(1, {given.groups, -1});  // [tokens, groups, experts]
        int64_t summed = given.sums ? given.summed : 1;
        auto scores = std::get<0>(grouped.to(at::kFloat).topk(summed)).sum(-1);
        auto losers = std::get<1>(scores.sort(/*stable=*/true, 1, /*descending=*/true)).slice(1, given.kept);
        auto lost = at::zeros(scores.sizes(), at::kBool).scatter_(1, losers, true);
        out[0].set(grouped.masked_fill(lost.unsqueeze(-1), 0).flatten(1));
    };
    *operation = new Plain("GroupTopkOperation", 2, 1, check, run);
    return 0;
}

}  // namespace atb
