"""The operations that models call, one module per family.

Each is declared once (see :mod:`hal.ops.declaration.operation`), and runs on the active backend.
"""

from hal.ops.activation import silu_and_mul
from hal.ops.attention import paged_attention
from hal.ops.cache import store_kv_cache
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import Operation, activate, catalogue, fused_op, op, operation, operation_of_node
from hal.ops.declaration.samples import Draw, Sample
from hal.ops.fused_quantization import (
    add_rms_norm_dynamic_quantize,
    add_rms_norm_quantize,
    silu_and_mul_dynamic_quantize,
    silu_and_mul_quantize,
)
from hal.ops.kernels.kernel_table import intercepted
from hal.ops.norm import add_rms_norm, rms_norm
from hal.ops.projection import embedding, linear
from hal.ops.quantization import dynamic_quantize, quant_linear_dynamic, quant_linear_static, quantize
from hal.ops.rotary import rotary_embedding, split_qkv_rmsnorm_rope, split_qkv_rmsnorm_rope_cache
from hal.ops.sampling import greedy_sample, sample

__all__ = [
    "FLOATING", "Draw", "Operation", "Sample", "activate", "add_rms_norm", "add_rms_norm_dynamic_quantize",
    "add_rms_norm_quantize", "catalogue", "dynamic_quantize", "embedding", "fused_op", "greedy_sample",
    "intercepted", "linear", "op", "operation", "operation_of_node", "paged_attention", "quant_linear_dynamic",
    "quant_linear_static", "quantize", "rms_norm", "rotary_embedding", "sample", "silu_and_mul",
    "silu_and_mul_dynamic_quantize", "silu_and_mul_quantize", "split_qkv_rmsnorm_rope",
    "split_qkv_rmsnorm_rope_cache", "store_kv_cache",
]  # fmt: skip
