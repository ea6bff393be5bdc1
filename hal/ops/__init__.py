"""The operations that models are written in, one module a family.

Each is declared once (see :mod:`hal.ops.declaration`) and runs on whichever backend is active.
"""

from hal.ops.activation import silu_and_mul
from hal.ops.attention import paged_attention
from hal.ops.cache import store_kv_cache
from hal.ops.declaration import Operation, activate, catalogue, fused_op, intercepted, op, operation, operation_of_node
from hal.ops.norm import add_rms_norm, rms_norm
from hal.ops.projection import embedding, linear
from hal.ops.rotary import rotary_embedding, split_qkv_rmsnorm_rope, split_qkv_rmsnorm_rope_cache
from hal.ops.samples import Draw, Sample
from hal.ops.sampling import greedy_sample, sample

__all__ = [
    "Draw", "Operation", "Sample", "activate", "add_rms_norm", "catalogue", "embedding", "fused_op", "greedy_sample",
    "intercepted", "linear", "op", "operation", "operation_of_node", "paged_attention", "rms_norm", "rotary_embedding",
    "sample", "silu_and_mul", "split_qkv_rmsnorm_rope", "split_qkv_rmsnorm_rope_cache", "store_kv_cache",
]  # fmt: skip
