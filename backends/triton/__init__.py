"""Triton kernels that drivers share, one module per family of operations.

Importing this package requires triton, so a driver imports it when it is opened. If TRITON_INTERPRET=1 is set before,
the kernels run on CPU tensors in Triton's interpreter, slowly.
"""

from collections.abc import Mapping
from types import MappingProxyType

from hal.ops.kernels.kernel_table import Kernel
from hal.ops.kernels.partial_kernel import FormKernels

from .activation import (
    clipped_silu_and_mul,
    gelu_and_mul,
    silu_and_mul,
    silu_and_mul_dynamic_quantize,
    silu_and_mul_quantize,
)
from .attention import paged_attention
from .cache import store_kv_cache
from .experts.permutation import expert_permute, expert_unpermute
from .experts.projections import expert_mlp, grouped_linear, quant_expert_mlp_dynamic, quant_expert_mlp_static
from .experts.routing import topk_route
from .low_bits.product import linear, takes
from .norm import add_rms_norm, add_rms_norm_dynamic_quantize, add_rms_norm_quantize, rms_norm
from .quantization import dynamic_quantize, quantize
from .recurrent.convolution import causal_conv1d
from .recurrent.delta_rule import gated_delta_rule
from .recurrent.row_norms import delta_rule_gates, gated_rms_norm, l2_norm
from .rotary import rotary_embedding, split_qkv_rmsnorm_rope, split_qkv_rmsnorm_rope_cache
from .streams import collapse_streams, expand_streams

KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        "add_rms_norm": add_rms_norm,
        "add_rms_norm_dynamic_quantize": add_rms_norm_dynamic_quantize,
        "add_rms_norm_quantize": add_rms_norm_quantize,
        "causal_conv1d": causal_conv1d,
        "clipped_silu_and_mul": clipped_silu_and_mul,
        "collapse_streams": collapse_streams,
        "delta_rule_gates": delta_rule_gates,
        "dynamic_quantize": dynamic_quantize,
        "expert_mlp": expert_mlp,
        "expert_permute": expert_permute,
        "expert_unpermute": expert_unpermute,
        "expand_streams": expand_streams,
        "gated_delta_rule": gated_delta_rule,
        "gated_rms_norm": gated_rms_norm,
        "gelu_and_mul": gelu_and_mul,
        "grouped_linear": grouped_linear,
        "l2_norm": l2_norm,
        "linear": FormKernels("linear", [(takes, linear)]),
        "paged_attention": paged_attention,
        "quant_expert_mlp_dynamic": quant_expert_mlp_dynamic,
        "quant_expert_mlp_static": quant_expert_mlp_static,
        "quantize": quantize,
        "rms_norm": rms_norm,
        "rotary_embedding": rotary_embedding,
        "silu_and_mul": silu_and_mul,
        "silu_and_mul_dynamic_quantize": silu_and_mul_dynamic_quantize,
        "silu_and_mul_quantize": silu_and_mul_quantize,
        "split_qkv_rmsnorm_rope": split_qkv_rmsnorm_rope,
        "split_qkv_rmsnorm_rope_cache": split_qkv_rmsnorm_rope_cache,
        "store_kv_cache": store_kv_cache,
        "topk_route": topk_route,
    }
)
"""Triton kernels by operation."""

__all__ = ["KERNELS"]
