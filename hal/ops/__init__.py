"""The operations that models call, one module per family.

Each is declared once (see :mod:`hal.ops.declaration.operation`), and runs on the active backend.
"""

from hal.ops.activation import GatedActivation, clipped_silu_and_mul, gelu, gelu_and_mul, pointwise, silu_and_mul
from hal.ops.attention import AttentionOptions, paged_attention
from hal.ops.block_selection import attend_chosen, select_blocks
from hal.ops.cache import quantized_paged_attention, store_kv_cache, store_quantized_kv_cache
from hal.ops.collectives import all_gather, all_gather_rows, all_reduce, all_to_all, reduce_scatter
from hal.ops.compressed_attention import attend_compressed
from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import Operation, activate, catalogue, fused_op, op, operation, operation_of_node
from hal.ops.dense_attention import packed_attention, scaled_dot_product_attention
from hal.ops.experts.dispatch import expert_combine, expert_dispatch
from hal.ops.experts.grouped import expert_mlp, grouped_linear
from hal.ops.experts.quantized import quant_expert_mlp_dynamic, quant_expert_mlp_static
from hal.ops.experts.routing import expert_permute, expert_unpermute, topk_route
from hal.ops.experts.table_routing import softplus_route
from hal.ops.forms import FLOAT, Form, Numbers, declare_numbers
from hal.ops.fused_collectives import (
    all_gather_linear,
    all_reduce_add_rms_norm,
    linear_all_reduce,
    linear_reduce_scatter,
)
from hal.ops.group_pooling import pool_groups
from hal.ops.hyper_connection import HyperConnectionOptions, collapse_streams, expand_streams
from hal.ops.kernels.kernel_table import intercepted
from hal.ops.latent_attention import (
    head_linear,
    latent_attention,
    multi_head_latent_attention,
    store_latent_cache,
)
from hal.ops.logits import mask_logits, penalize
from hal.ops.lora import add_lora
from hal.ops.ngrams import hash_ngrams
from hal.ops.norm import add_rms_norm, gated_rms_norm, l2_norm, layer_norm, rms_norm
from hal.ops.projection import embedding, linear
from hal.ops.quantization import (
    add_rms_norm_dynamic_quantize,
    add_rms_norm_quantize,
    dynamic_quantize,
    float8_quantize,
    quantize,
    silu_and_mul_dynamic_quantize,
    silu_and_mul_quantize,
)
from hal.ops.recurrence import causal_conv1d, channel_delta_rule, delta_rule_gates, gated_delta_rule
from hal.ops.rotary import rotary_embedding, split_qkv_rmsnorm_rope, split_qkv_rmsnorm_rope_cache
from hal.ops.sampling import greedy_sample, sample
from hal.ops.selected_attention import select_and_attend
from hal.ops.selection import attend_selected, select_keys, store_index_cache

__all__ = [
    "FLOAT",
    "FLOATING",
    "AttentionOptions",
    "Draw",
    "Form",
    "GatedActivation",
    "HyperConnectionOptions",
    "Numbers",
    "Operation",
    "Sample",
    "activate",
    "add_lora",
    "add_rms_norm",
    "add_rms_norm_dynamic_quantize",
    "add_rms_norm_quantize",
    "all_gather",
    "all_gather_linear",
    "all_gather_rows",
    "all_reduce",
    "all_reduce_add_rms_norm",
    "all_to_all",
    "attend_chosen",
    "attend_compressed",
    "attend_selected",
    "catalogue",
    "causal_conv1d",
    "channel_delta_rule",
    "clipped_silu_and_mul",
    "collapse_streams",
    "declare_numbers",
    "delta_rule_gates",
    "dynamic_quantize",
    "embedding",
    "expand_streams",
    "expert_combine",
    "expert_dispatch",
    "expert_mlp",
    "expert_permute",
    "expert_unpermute",
    "float8_quantize",
    "fused_op",
    "gated_delta_rule",
    "gated_rms_norm",
    "gelu",
    "gelu_and_mul",
    "greedy_sample",
    "grouped_linear",
    "hash_ngrams",
    "head_linear",
    "intercepted",
    "l2_norm",
    "latent_attention",
    "layer_norm",
    "linear",
    "linear_all_reduce",
    "linear_reduce_scatter",
    "mask_logits",
    "multi_head_latent_attention",
    "op",
    "operation",
    "operation_of_node",
    "packed_attention",
    "paged_attention",
    "penalize",
    "pointwise",
    "pool_groups",
    "quant_expert_mlp_dynamic",
    "quant_expert_mlp_static",
    "quantize",
    "quantized_paged_attention",
    "reduce_scatter",
    "rms_norm",
    "rotary_embedding",
    "sample",
    "scaled_dot_product_attention",
    "select_and_attend",
    "select_blocks",
    "select_keys",
    "silu_and_mul",
    "silu_and_mul_dynamic_quantize",
    "silu_and_mul_quantize",
    "softplus_route",
    "split_qkv_rmsnorm_rope",
    "split_qkv_rmsnorm_rope_cache",
    "store_index_cache",
    "store_kv_cache",
    "store_latent_cache",
    "store_quantized_kv_cache",
    "topk_route",
]
