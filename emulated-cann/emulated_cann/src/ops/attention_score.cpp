// Flash attention for training, which scaled_dot_product_attention calls, and its gradient.
#include <limits>

#include "attention_core.h"
#include "attention_layout.h"

namespace {

using namespace emulator;

constexpr int64_t kNoLimit = int64_t{1} << 40;

struct ScoreAttention {
    In query, key, value, bias, drop_mask, padding_mask, mask;
    Ints prefix, query_ends, key_ends;
    double scale, keep;
    int64_t before, after, heads;
    std::string layout;
    int64_t sparse_mode;
    Out max, sum, output;
    int64_t bias_type = 1;  // 1: added before the scale, 0: after it
    bool packed() const { return layout == "TND"; }
};

int64_t kv_heads(const ScoreAttention& call) {
    if (call.layout == "BNSD" || call.layout == "TND") return call.key.size(1);
    if (call.layout == "BSND") return call.key.size(2);
    int64_t dim = call.query.size(2) / call.heads;
    return dim ? call.key.size(2) / dim : 0;
}

DOCUMENTED(
    "ops-transformer: attention/flash_attention_score/docs/aclnnFlashAttentionScoreV2.md"
    "; ops-transformer: attention/flash_attention_score/docs/aclnnFlashAttentionVarLenScoreV2.md");
void check(const ScoreAttention& call) {
    if (call.layout != "BSH" && call.layout != "SBH" && call.layout != "BNSD" && call.layout != "BSND" &&
        call.layout != "TND")
        throw Refused("input_layout must be BSH, SBH, BNSD, BSND or TND, not '" + call.layout + "'");
    auto dtype = call.query.dtype();
    if ((dtype != at::kHalf && dtype != at::kBFloat16 && dtype != at::kFloat) || call.key.dtype() != dtype ||
        call.value.dtype() != dtype)
        throw Refused("query, key and value must have the same dtype, one of float16, bfloat16 and float32, but are " +
                      c10::str(dtype, ", ", call.key.dtype(), " and ", call.value.dtype()));
    if (call.packed() != bool(call.query_ends.size()))
        throw Refused(
            "the layout TND requires actual_seq_qlen, and actual_seq_qlen requires TND, but input_layout is " +
            call.layout);
    if (call.drop_mask || call.keep != 1) throw NotEmulated("dropout is not emulated");
    if (call.bias_type != 0 && call.bias_type != 1)
        throw NotEmulated("pse_type " + std::to_string(call.bias_type) + " is not emulated; 0 and 1 are");
    if (call.padding_mask) throw NotEmulated("padding_mask is not emulated");
    if (call.prefix.size()) throw NotEmulated("prefix (sparse_mode 5 and 6) is not emulated");
    if (call.heads <= 0) throw Refused("head_num must be positive, but is " + std::to_string(call.heads));
    if (call.sparse_mode < 0 || call.sparse_mode > 4)
        throw NotEmulated("sparse_mode " + std::to_string(call.sparse_mode) + " is not emulated; 0 to 4 are");
    auto query = by_heads(call.query.raw(), call.layout, call.heads);
    if (query.size(-3) != call.heads)
        throw Refused("head_num must be that of the query, " + std::to_string(query.size(-3)) + ", but is " +
                      std::to_string(call.heads));
    if (query.size(-1) < 1 || query.size(-1) > 768)
        throw Refused("the head dimension must be between 1 and 768, but is " + std::to_string(query.size(-1)));
    int64_t groups = kv_heads(call);
    if (groups < 1 || call.heads % groups)
        throw Refused("head_num, " + std::to_string(call.heads) +
                      ", must be a multiple of the key's number of heads, " + std::to_string(groups));
    if (call.mask && call.mask.dtype() != at::kBool && call.mask.dtype() != at::kByte)
        throw Refused(std::string("atten_mask must be bool or uint8, not ") + c10::toString(call.mask.dtype()));
    if (call.mask && call.sparse_mode >= 2 &&
        (call.mask.raw().numel() != kCausalTemplate * kCausalTemplate || call.mask.size(-1) != kCausalTemplate))
        throw Refused("atten_mask for sparse_mode 2, 3 and 4 must have shape [2048, 2048], not " +
                      c10::str(call.mask.sizes()));
}

// Without atten_mask, sparse_mode has no effect and each query attends to all keys.
at::Tensor hidden_keys(const ScoreAttention& call, int64_t sequence, int64_t queries, int64_t keys) {
    if (!call.mask) return {};
    auto mask = call.mask.tensor();
    if (call.sparse_mode >= 2) {
        check_causal_template(mask.contiguous());
        if (call.sparse_mode == 2) return outside_band(queries, keys, kNoLimit, 0, 0);
        if (call.sparse_mode == 3) return outside_band(queries, keys, kNoLimit, 0, keys - queries);
        return outside_band(queries, keys, call.before, call.after, keys - queries);
    }
    if (mask.dim() == 4) mask = mask[mask.size(0) == 1 ? 0 : sequence];  // [1 or N, S, S]
    mask = mask.to(at::kBool);
    if (call.packed()) mask = mask.narrow(-2, 0, queries).narrow(-1, 0, keys);
    if (call.sparse_mode == 1) return mask;
    return either(mask, outside_band(queries, keys, call.before, call.after, 0));
}

// The sequences of a call, and their parts of tensors by heads, [N or 1, heads, tokens, D].
struct Sequences {
    explicit Sequences(const ScoreAttention& call)
        : call(call),
          query(by_heads(call.query.raw(), call.layout, call.heads)),
          key(by_heads(call.key.raw(), call.layout, kv_heads(call))),
          value(by_heads(call.value.raw(), call.layout, kv_heads(call))),
          queries(call.packed() ? packed_spans(call.query_ends, query.size(1), "actual_seq_qlen")
                                : std::vector<Span>(query.size(0), {0, query.size(2)})),
          keys(call.packed() ? packed_spans(call.key_ends, key.size(1), "actual_seq_kvlen")
                             : std::vector<Span>(query.size(0), {0, key.size(2)})) {}
    at::Tensor part(const at::Tensor& tensor, size_t sequence, Span span) const {
        return (call.packed() ? tensor : tensor[sequence]).narrow(1, span.start, span.length);
    }
    at::Tensor of_queries(const at::Tensor& tensor, size_t sequence) const {
        return part(by_heads(tensor, call.layout, call.heads), sequence, queries[sequence]);
    }
    at::Tensor of_keys(const at::Tensor& tensor, size_t sequence) const {
        return part(by_heads(tensor, call.layout, kv_heads(call)), sequence, keys[sequence]);
    }
    AttentionInputs inputs(size_t sequence) const {
        AttentionInputs inputs{.query = part(query, sequence, queries[sequence]),
                               .key = part(key, sequence, keys[sequence]),
                               .value = part(value, sequence, keys[sequence]),
                               .scale = call.scale,
                               .hidden =
                                   hidden_keys(call, sequence, queries[sequence].length, keys[sequence].length),
                               .bias_before_scale = call.bias_type == 1};
        if (call.bias) inputs.bias = call.bias.tensor()[call.bias.size(0) == 1 ? 0 : sequence];
        return inputs;
    }
    const ScoreAttention& call;
    at::Tensor query, key, value;
    std::vector<Span> queries, keys;
};

void run(const ScoreAttention& call) {
    Sequences sequences(call);
    auto max = call.packed() ? call.max.raw().permute({1, 0, 2}) : call.max.raw(),
         sum = call.packed() ? call.sum.raw().permute({1, 0, 2}) : call.sum.raw();
    for (size_t b = 0; b < sequences.queries.size(); ++b) {
        auto result = attend(sequences.inputs(b));
        sequences.of_queries(call.output.raw(), b).copy_(result.output);
        // The kernel stores the value of each row eight times, the width of a vector.
        sequences.part(max, b, sequences.queries[b]).copy_(result.max.unsqueeze(-1));
        sequences.part(sum, b, sequences.queries[b]).copy_(result.sum.unsqueeze(-1));
    }
}

double flops(const ScoreAttention& call) {
    auto query = by_heads(call.query.raw(), call.layout, call.heads);
    int64_t dim = query.size(-1);
    if (!call.packed()) {
        int64_t keys = by_heads(call.key.raw(), call.layout, kv_heads(call)).size(2);
        return query.size(0) * attention_flops(call.heads, query.size(2), keys, dim, dim);
    }
    auto queries = packed_spans(call.query_ends, query.size(1), "actual_seq_qlen");
    auto keys = packed_spans(call.key_ends, call.key.size(0), "actual_seq_kvlen");
    double total = 0;
    for (size_t b = 0; b < queries.size(); ++b)
        total += attention_flops(call.heads, queries[b].length, keys[b].length, dim, dim);
    return total;
}

ScoreAttention dense(In query, In key, In value, In bias, In drop_mask, In padding_mask, In mask, Ints prefix,
                     double scale, double keep, int64_t before, int64_t after, int64_t heads, Text layout,
                     int64_t inner_precise, int64_t sparse_mode, Out max, Out sum, Out softmax, Out output) {
    return {query, key,  value,  bias,  drop_mask, padding_mask, mask,        prefix, nullptr, nullptr,
            scale, keep, before, after, heads,     layout.value, sparse_mode, max,    sum,     output};
}

ScoreAttention packed(In query, In key, In value, In bias, In drop_mask, In padding_mask, In mask, Ints prefix,
                      Ints query_ends, Ints key_ends, double scale, double keep, int64_t before, int64_t after,
                      int64_t heads, Text layout, int64_t inner_precise, int64_t sparse_mode, Out max, Out sum,
                      Out softmax, Out output) {
    return {query, key,  value,  bias,  drop_mask, padding_mask, mask,        prefix, query_ends, key_ends,
            scale, keep, before, after, heads,     layout.value, sparse_mode, max,    sum,        output};
}

// Ascend950's function for both layouts. Its additional arguments are not emulated.
ScoreAttention newest(In query, In key, In value, In bias, In drop_mask, In padding_mask, In mask, In query_rope,
                      In key_rope, In query_scale, In key_scale, In value_scale, In sink, Ints prefix, Ints query_ends,
                      Ints key_ends, Ints query_start, Ints key_start, double scale, double keep, int64_t before,
                      int64_t after, int64_t heads, Text layout, int64_t inner_precise, int64_t sparse_mode,
                      int64_t output_type, int64_t bias_type, Text softmax_layout, int64_t seed, int64_t offset,
                      Out max, Out sum, Out softmax, Out output) {
    if (query_rope || key_rope) throw NotEmulated("query_rope and key_rope are not emulated");
    if (query_scale || key_scale || value_scale) throw NotEmulated("quantized query, key and value are not emulated");
    if (sink) throw NotEmulated("sink is not emulated");
    return {query, key,    value, bias,  drop_mask,    padding_mask, mask, prefix, query_ends, key_ends, scale,
            keep,  before, after, heads, layout.value, sparse_mode,  max,  sum,    output,     bias_type};
}

// The gradients are of softmax(scale * (query @ key.T)) @ value. The weights are computed again from query and key.
void FlashAttentionScoreGrad(In query, In key, In value, In grad, In bias, In drop_mask, In padding_mask, In mask,
                             In max, In sum, In, In output, Ints prefix, double scale, double keep, int64_t before,
                             int64_t after, int64_t heads, Text layout, int64_t precise, int64_t sparse_mode,
                             Out grad_query, Out grad_key, Out grad_value, Out) {
    auto call = dense(query, key, value, bias, drop_mask, padding_mask, mask, prefix, scale, keep, before, after, heads,
                      layout, precise, sparse_mode, nullptr, nullptr, nullptr, nullptr);
    Sequences sequences(call);
    for (size_t b = 0; b < sequences.queries.size(); ++b) {
        auto inputs = sequences.inputs(b);
        auto shared = [&](const at::Tensor& tensor) {  // [query heads, keys, D]
            return tensor.to(at::kFloat).repeat_interleave(heads / tensor.size(0), 0);
        };
        auto summed = [&](const at::Tensor& gradient) {  // over the query heads of a key head
            return gradient.unflatten(0, {inputs.key.size(0), -1}).sum(1);
        };
        auto q = inputs.query.to(at::kFloat), k = shared(inputs.key), v = shared(inputs.value);
        auto above = sequences.of_queries(grad.raw(), b).to(at::kFloat);
        auto scores = at::matmul(q, k.mT()) * scale;
        if (inputs.hidden.defined()) scores.masked_fill_(inputs.hidden, -std::numeric_limits<float>::infinity());
        auto weights = scores.softmax(-1).nan_to_num(0);  // a query without keys
        auto of_weights = at::matmul(above, v.mT());
        auto of_scores = weights * (of_weights - (weights * of_weights).sum(-1, true)) * scale;
        sequences.of_queries(grad_query.raw(), b).copy_(at::matmul(of_scores, k));
        sequences.of_keys(grad_key.raw(), b).copy_(summed(at::matmul(of_scores.mT(), q)));
        sequences.of_keys(grad_value.raw(), b).copy_(summed(at::matmul(weights.mT(), above)));
    }
}
void check_gradient(In query, In key, In value, In, In bias, In drop_mask, In padding_mask, In mask, In, In, In, In,
                    Ints prefix, double scale, double keep, int64_t before, int64_t after, int64_t heads, Text layout,
                    int64_t precise, int64_t sparse_mode, Out, Out, Out, Out) {
    if (bias) throw NotEmulated("the gradient with pse is not emulated");
    check(dense(query, key, value, bias, drop_mask, padding_mask, mask, prefix, scale, keep, before, after, heads,
                layout, precise, sparse_mode, nullptr, nullptr, nullptr, nullptr));
}

template <auto read>
struct Kernel;
template <class... Arguments, ScoreAttention (*read)(Arguments...)>
struct Kernel<read> {
    static void run(Arguments... arguments) { ::run(read(arguments...)); }
    static void check(Arguments... arguments) { ::check(read(arguments...)); }
    static double flops(Arguments... arguments) { return ::flops(read(arguments...)); }
};

constexpr auto& FlashAttentionScore = Kernel<dense>::run;
constexpr auto& FlashAttentionVarLenScore = Kernel<packed>::run;
constexpr auto& FlashAttentionScoreV4 = Kernel<newest>::run;

}  // namespace

ACLNN(FlashAttentionScore, .check = Kernel<dense>::check, .flops = Kernel<dense>::flops, .workspace = 1024)
ACLNN(FlashAttentionScoreGrad, .check = check_gradient, .workspace = 1024)
ACLNN(FlashAttentionVarLenScore, .check = Kernel<packed>::check, .flops = Kernel<packed>::flops, .workspace = 1024)
ACLNN(FlashAttentionScoreV4, .check = Kernel<newest>::check, .flops = Kernel<newest>::flops, .workspace = 1024)
