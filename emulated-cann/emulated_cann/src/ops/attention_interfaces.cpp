// The aclnn functions of inference attention. Each converts its arguments to an InferAttention.
#include "attention_infer.h"

namespace {

using namespace emulator;

struct Call {
    InferAttention request;
    Out output, lse;
};

constexpr int64_t kAll = 2147483647;
constexpr int64_t kByTokenAndHead = 5;

Call fused_v4(In query, Ins key, Ins value, In pse_shift, In mask, Ints query_lengths, Ints key_lengths,
              In dequant_scale1, In quant_scale1, In dequant_scale2, In quant_scale2, In quant_offset2,
              In antiquant_scale, In antiquant_offset, In block_table, In query_padding, In key_padding,
              In key_antiquant_scale, In key_antiquant_offset, In value_antiquant_scale, In value_antiquant_offset,
              In key_prefix, In value_prefix, Ints prefix_length, In query_rope, In key_rope,
              In key_rope_antiquant_scale, In dequant_scale_query, In sink, int64_t heads, double scale,
              int64_t pre_tokens, int64_t next_tokens, Text layout, int64_t kv_heads, int64_t sparse_mode,
              int64_t inner_precise, int64_t block_size, int64_t antiquant_mode, bool want_lse,
              int64_t key_antiquant_mode, int64_t value_antiquant_mode, int64_t query_quant_mode, Out output, Out lse) {
    InferAttention request{.query = query,
                           .key = key,
                           .value = value,
                           .bias = pse_shift,
                           .mask = mask,
                           .query_lengths = query_lengths,
                           .key_lengths = key_lengths,
                           .block_table = block_table,
                           .sink = sink,
                           .query_rope = query_rope,
                           .key_rope = key_rope,
                           .key_scale = key_antiquant_scale,
                           .value_scale = value_antiquant_scale,
                           .key_mode = key_antiquant_mode,
                           .value_mode = value_antiquant_mode,
                           .heads = heads,
                           .kv_heads = kv_heads,
                           .scale = scale,
                           .before = pre_tokens,
                           .after = next_tokens,
                           .layout = layout.value,
                           .sparse_mode = sparse_mode,
                           .block_size = block_size,
                           .inner_precise = inner_precise,
                           .want_lse = want_lse,
                           .first_version = false};
    request.unsupported = {
        {"a quantized attention (dequant_scale1, quant_scale1, dequant_scale2, dequant_scale_query)",
         dequant_scale1 || quant_scale1 || dequant_scale2 || dequant_scale_query},
        {"a quantized output (quant_scale2, quant_offset2)", quant_scale2 || quant_offset2},
        {"a quantized cache with antiquant_scale, offsets or rotary scales",
         antiquant_scale || antiquant_offset || key_antiquant_offset || value_antiquant_offset ||
             key_rope_antiquant_scale},
        {"a quantized cache of another key_antiquant_mode than 5, a scale of each token and head in blocks",
         (key_antiquant_scale || value_antiquant_scale) && key_antiquant_mode != kByTokenAndHead},
        {"left padding (query_padding_size, kv_padding_size)", query_padding || key_padding},
        {"a shared prefix (key_shared_prefix, value_shared_prefix)", key_prefix || value_prefix},
    };
    return {request, output, lse};
}

Call fused_v3(In query, Ins key, Ins value, In pse_shift, In mask, Ints query_lengths, Ints key_lengths,
              In dequant_scale1, In quant_scale1, In dequant_scale2, In quant_scale2, In quant_offset2,
              In antiquant_scale, In antiquant_offset, In block_table, In query_padding, In key_padding,
              In key_antiquant_scale, In key_antiquant_offset, In value_antiquant_scale, In value_antiquant_offset,
              In key_prefix, In value_prefix, Ints prefix_length, In query_rope, In key_rope,
              In key_rope_antiquant_scale, int64_t heads, double scale, int64_t pre_tokens, int64_t next_tokens,
              Text layout, int64_t kv_heads, int64_t sparse_mode, int64_t inner_precise, int64_t block_size,
              int64_t antiquant_mode, bool want_lse, int64_t key_antiquant_mode, int64_t value_antiquant_mode,
              Out output, Out lse) {
    Call call =
        fused_v4(query, key, value, pse_shift, mask, query_lengths, key_lengths, dequant_scale1, quant_scale1,
                 dequant_scale2, quant_scale2, quant_offset2, antiquant_scale, antiquant_offset, block_table,
                 query_padding, key_padding, key_antiquant_scale, key_antiquant_offset, value_antiquant_scale,
                 value_antiquant_offset, key_prefix, value_prefix, prefix_length, query_rope, key_rope,
                 key_rope_antiquant_scale, nullptr, nullptr, heads, scale, pre_tokens, next_tokens, layout, kv_heads,
                 sparse_mode, inner_precise, block_size, antiquant_mode, want_lse, key_antiquant_mode,
                 value_antiquant_mode, 0, output, lse);
    call.request.first_version = true;
    return call;
}

Call incremental(In query, Ins key, Ins value, In pse_shift, In mask, Ints key_lengths, In dequant_scale1,
                 In quant_scale1, In dequant_scale2, In quant_scale2, In quant_offset2, In antiquant_scale,
                 In antiquant_offset, In block_table, In key_padding, int64_t heads, double scale, Text layout,
                 int64_t kv_heads, int64_t block_size, int64_t inner_precise, Out output) {
    return fused_v3(query, key, value, pse_shift, mask, nullptr, key_lengths, dequant_scale1, quant_scale1,
                    dequant_scale2, quant_scale2, quant_offset2, antiquant_scale, antiquant_offset, block_table,
                    nullptr, key_padding, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                    nullptr, nullptr, heads, scale, kAll, kAll, layout, kv_heads, 0, inner_precise, block_size, 0,
                    false, 0, 0, output, nullptr);
}

Call prompt(In query, In key, In value, In pse_shift, In mask, Ints query_lengths, Ints key_lengths, In dequant_scale1,
            In quant_scale1, In dequant_scale2, In quant_scale2, In quant_offset2, int64_t heads, double scale,
            int64_t pre_tokens, int64_t next_tokens, Text layout, int64_t kv_heads, int64_t sparse_mode,
            int64_t inner_precise, Out output) {
    Ins keys(nullptr), values(nullptr);
    keys.items.push_back(key), values.items.push_back(value);
    return fused_v3(query, keys, values, pse_shift, mask, query_lengths, key_lengths, dequant_scale1, quant_scale1,
                    dequant_scale2, quant_scale2, quant_offset2, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                    nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, heads, scale,
                    pre_tokens, next_tokens, layout, kv_heads, sparse_mode, inner_precise, 0, 0, false, 0, 0, output,
                    nullptr);
}

DOCUMENTED(
    "ops-transformer: attention/fused_infer_attention_score/docs/aclnnFusedInferAttentionScoreV4.md"
    "; ops-transformer: attention/incre_flash_attention/docs/aclnnIncreFlashAttentionV4.md"
    "; ops-transformer: attention/prompt_flash_attention/docs/aclnnPromptFlashAttentionV3.md");
// The body, check and operation count of a function, from the conversion of its arguments.
template <auto read>
struct Kernel;
template <class... Arguments, Call (*read)(Arguments...)>
struct Kernel<read> {
    static void run(Arguments... arguments) {
        Call call = read(arguments...);
        emulator::run(call.request, call.output, call.lse);
    }
    static void check(Arguments... arguments) {
        Call call = read(arguments...);
        emulator::check(call.request);
        if (!call.output.raw().is_contiguous() || call.output.dtype() != call.request.query.dtype())
            throw Refused("attention_out must be contiguous and have the query's dtype, " +
                          c10::str(call.request.query.dtype(), ", not ", call.output.dtype()));
        if (call.request.want_lse && (call.lse.dtype() != at::kFloat || call.lse.dim() < 3))
            throw Refused("softmax_lse must be float32 of shape [B, N, Q_S, 1], or [T, N, 1] in a TND layout, not " +
                          c10::str(call.lse.dtype(), " of shape ", call.lse.sizes()));
    }
    static double flops(Arguments... arguments) { return emulator::flops(read(arguments...).request); }
};

constexpr auto& FusedInferAttentionScoreV3 = Kernel<fused_v3>::run;
constexpr auto& FusedInferAttentionScoreV4 = Kernel<fused_v4>::run;
constexpr auto& IncreFlashAttentionV4 = Kernel<incremental>::run;
constexpr auto& PromptFlashAttentionV3 = Kernel<prompt>::run;

// Not zero, to exercise the caller's workspace handling.

}  // namespace

ACLNN(FusedInferAttentionScoreV3, .check = Kernel<fused_v3>::check, .flops = Kernel<fused_v3>::flops,
      .workspace = kWorkspace)
ACLNN(FusedInferAttentionScoreV4, .check = Kernel<fused_v4>::check, .flops = Kernel<fused_v4>::flops,
      .workspace = kWorkspace)
ACLNN(IncreFlashAttentionV4, .check = Kernel<incremental>::check, .flops = Kernel<incremental>::flops,
      .workspace = kWorkspace)
ACLNN(PromptFlashAttentionV3, .check = Kernel<prompt>::check, .flops = Kernel<prompt>::flops, .workspace = kWorkspace)

// The workspace that suffices for all lengths. In the emulator it is the same one.
#define MAX_WORKSPACE(name)                                                                                   \
    [[gnu::used, gnu::noinline, gnu::noclone]] static void export_max_##name() {                              \
        asm volatile(".globl aclnn" #name                                                                     \
                     "GetMaxWorkspaceSize\n"                                                                  \
                     ".type aclnn" #name                                                                      \
                     "GetMaxWorkspaceSize, @function\n"                                                       \
                     ".set aclnn" #name "GetMaxWorkspaceSize, %c0" ::"X"(&Entry<&name>::get_workspace_size)); \
    }
MAX_WORKSPACE(FusedInferAttentionScoreV3)
MAX_WORKSPACE(FusedInferAttentionScoreV4)
