"""Kernels of the operations on torch_npu's. Attention is in attention.py."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from hal import ops
from hal.ops.declaration import Kernel

from .attention import AtbAttention, FusedAttention

FRACTAL_NZ = 29


def kernels(device: torch.device, *, attention: str) -> dict[str, Kernel]:
    """By operation, for a canonical cache."""
    return {
        "add_rms_norm": add_rms_norm,
        "embedding": functional.embedding,
        "greedy_sample": greedy_sample,
        "linear": functional.linear,
        "paged_attention": (AtbAttention if attention == "atb" else FusedAttention)(device),
        "rms_norm": rms_norm,
        "rotary_embedding": rotary_embedding,
        "sample": ops.operation("sample").body,
        "silu_and_mul": silu_and_mul,
        "store_kv_cache": store_kv_cache,
    }


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See :func:`hal.ops.rms_norm`."""
    return torch_npu.npu_rms_norm(x, weight, eps)[0]  # type: ignore[no-any-return]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See :func:`hal.ops.add_rms_norm`."""
    normed, _, hidden = torch_npu.npu_add_rms_norm(x, residual, weight, eps)
    return normed, hidden


def silu_and_mul(x: Tensor) -> Tensor:
    """See :func:`hal.ops.silu_and_mul`."""
    return torch_npu.npu_swiglu(x, dim=-1)  # type: ignore[no-any-return]


def rotary_embedding(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`hal.ops.rotary_embedding`. Not npu_apply_rotary_pos_emb: it writes into its inputs."""
    cos, sin = cos[None, :, None], sin[None, :, None]
    return (
        torch_npu.npu_rotary_mul(query.unsqueeze(0), cos, sin).squeeze(0),
        torch_npu.npu_rotary_mul(key.unsqueeze(0), cos, sin).squeeze(0),
    )


def store_kv_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """See :func:`hal.ops.store_kv_cache`."""
    torch_npu.npu_scatter_pa_kv_cache(
        key.contiguous(), value.contiguous(), key_cache, value_cache, slot_mapping, cache_mode="Norm"
    )


def greedy_sample(logits: Tensor) -> Tensor:
    """See :func:`hal.ops.greedy_sample`."""
    return logits.argmax(-1)


def in_fractal_nz(weight: Tensor) -> Tensor:
    """A projection's weight in FRACTAL_NZ: the same shape, in the tiles that matrix products compute on."""
    return torch_npu.npu_format_cast(weight, FRACTAL_NZ)  # type: ignore[no-any-return]
