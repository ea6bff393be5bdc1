"""Kernels in Triton for what torch and FlashInfer lack, one module a family of operations.

Each is a function with its operation's arguments. Import this only where triton is installed: the driver does so late.
With TRITON_INTERPRET=1 set before that, they run on CPU tensors, slowly, in Triton's interpreter.
"""

from collections.abc import Mapping
from types import MappingProxyType

from hal.ops.kernels.kernel_table import Kernel

from .activation import silu_and_mul, silu_and_mul_dynamic_quantize, silu_and_mul_quantize
from .attention import paged_attention
from .cache import store_kv_cache
from .norm import add_rms_norm, add_rms_norm_dynamic_quantize, add_rms_norm_quantize, rms_norm
from .quantization import dynamic_quantize, quantize
from .rotary import rotary_embedding, split_qkv_rmsnorm_rope, split_qkv_rmsnorm_rope_cache

KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        "add_rms_norm": add_rms_norm,
        "add_rms_norm_dynamic_quantize": add_rms_norm_dynamic_quantize,
        "add_rms_norm_quantize": add_rms_norm_quantize,
        "dynamic_quantize": dynamic_quantize,
        "paged_attention": paged_attention,
        "quantize": quantize,
        "rms_norm": rms_norm,
        "rotary_embedding": rotary_embedding,
        "silu_and_mul": silu_and_mul,
        "silu_and_mul_dynamic_quantize": silu_and_mul_dynamic_quantize,
        "silu_and_mul_quantize": silu_and_mul_quantize,
        "split_qkv_rmsnorm_rope": split_qkv_rmsnorm_rope,
        "split_qkv_rmsnorm_rope_cache": split_qkv_rmsnorm_rope_cache,
        "store_kv_cache": store_kv_cache,
    }
)
"""By operation name."""

__all__ = ["KERNELS"]
