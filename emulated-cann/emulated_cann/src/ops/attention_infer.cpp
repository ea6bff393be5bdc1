#include "attention_infer.h"

#include <limits>

#include "attention_core.h"
#include "attention_plan.h"

namespace emulator {

namespace {

// Returns the keys or values of one sequence: [kv_heads, length, D]. Those of a quantized cache are float32.
at::Tensor rows_of(const In& tensor, const In& scale, const InferAttention& request, const AttentionPlan& plan,
                   int64_t sequence, bool shared = true) {
    auto span = plan.keys[sequence];
    if (plan.paged) {
        auto blocks = request.block_table.raw()[sequence];
        auto rows = gather_blocks(tensor.raw(), blocks, plan.kv_heads, request.block_size, span.length);
        if (!scale) return rows;
        auto scales = gather_blocks(scale.raw().unsqueeze(-1), blocks, plan.kv_heads, request.block_size, span.length);
        return rows.to(at::kFloat) * scales;
    }
    auto heads = by_heads(tensor.raw(), plan.layout.input, plan.kv_heads);
    if (!plan.layout.packed) heads = heads[shared ? sequence : 0];
    return heads.narrow(1, span.start, span.length);
}

at::Tensor rows_of(const Ins& tensors, const In& scale, const InferAttention& request, const AttentionPlan& plan,
                   int64_t sequence) {
    bool shared = tensors.size() == 1;
    return rows_of(tensors[shared ? 0 : sequence], scale, request, plan, sequence, shared);
}

}  // namespace

void check(const InferAttention& request) { AttentionPlan plan(request); }

double flops(const InferAttention& request) {
    AttentionPlan plan(request);
    int64_t dim = by_heads(request.query.raw(), plan.layout.input, plan.heads).size(-1);
    int64_t key_dim = request.query_rope ? dim + kRopeDim : dim;
    double total = 0;
    for (int64_t b = 0; b < plan.batch; ++b)
        total += attention_flops(plan.heads, plan.queries[b].length, plan.keys[b].length, key_dim, dim);
    return total;
}

void run(const InferAttention& request, const Out& output, const Out& lse) {
    AttentionPlan plan(request);
    bool packed = plan.layout.packed;
    auto queries = by_heads(request.query.raw(), plan.layout.input, plan.heads);
    auto outputs = by_heads(output.raw(), plan.layout.output, plan.heads);
    at::Tensor lses;
    if (request.want_lse) lses = packed ? lse.raw().squeeze(-1).t() : lse.raw().squeeze(-1);
    for (int64_t b = 0; b < plan.batch; ++b) {
        auto span = plan.queries[b];
        auto all_rows = packed ? outputs.narrow(1, span.start, span.length) : outputs[b];
        auto all_lses = !lses.defined() ? lses : packed ? lses.narrow(1, span.start, span.length) : lses[b];
        // Rows beyond a sequence's length get the result of a query that attends to no key.
        if (!packed && span.length < plan.query_rows) {
            all_rows.zero_();
            if (all_lses.defined()) all_lses.fill_(std::numeric_limits<float>::infinity());
        }
        auto rows = all_rows.narrow(1, 0, span.length);
        if (plan.keys[b].length == 0 || span.length == 0) {
            rows.zero_();
            if (all_lses.defined()) all_lses.narrow(1, 0, span.length).fill_(std::numeric_limits<float>::infinity());
            continue;
        }
        AttentionInputs inputs{.query = (packed ? queries : queries[b]).narrow(1, span.start, span.length),
                               .key = rows_of(request.key, request.key_scale, request, plan, b),
                               .value = rows_of(request.value, request.value_scale, request, plan, b),
                               .scale = request.scale,
                               .hidden = hidden_keys(request, plan, b)};
        if (request.bias) {
            auto bias = request.bias.raw();
            inputs.bias = bias[bias.size(0) == 1 ? 0 : b].narrow(1, 0, span.length).narrow(2, 0, plan.keys[b].length);
        }
        if (request.sink) inputs.sink = request.sink.raw();
        if (request.query_rope) {
            auto rope = by_heads(request.query_rope.raw(), plan.layout.input, plan.heads);
            rope = (packed ? rope : rope[b]).narrow(1, span.start, span.length);
            inputs.query = at::cat({inputs.query, rope}, -1);
            inputs.key = at::cat({inputs.key, rows_of(request.key_rope, nullptr, request, plan, b)}, -1);
        }
        auto result = attend(inputs);
        rows.copy_(result.output);
        if (all_lses.defined()) all_lses.narrow(1, 0, span.length).copy_(result.lse());
    }
}

}  // namespace emulator
