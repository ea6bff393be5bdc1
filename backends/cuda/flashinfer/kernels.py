"""FlashInfer's norms and activation. They support 16-bit types and whole vectors; another kernel runs other arguments.

Two families of FlashInfer are not used. Its rotary embedding takes positions and a float32 table, but the operation
takes the cosines and sines of each token. Its sampling has its own random generator, but the operation's draw is
reproducible.

Source: FlashInfer 0.6, ``flashinfer.norm`` and ``flashinfer.activation``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import torch
from torch import Tensor

from hal.ops.kernels.kernel_table import Kernel

HALVES = (torch.bfloat16, torch.float16)
VECTOR = 16
"""The size of a row must be a multiple of this many bytes."""


def kernels(device: torch.device, otherwise: Mapping[str, Kernel], *, in_graphs: bool) -> dict[str, Kernel]:
    """Return FlashInfer's kernels, by operation.

    Args:
        device: the GPU.
        otherwise: kernels for arguments that FlashInfer does not support, by operation.
        in_graphs: whether graphs capture FlashInfer's attention.
    """
    from .attention import FlashInferAttention

    flashinfer = import_module("flashinfer")
    plain_norm, plain_add, plain_silu = (otherwise[name] for name in ("rms_norm", "add_rms_norm", "silu_and_mul"))

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See :func:`hal.ops.rms_norm`."""
        if not _takes(x) or weight.dtype is not x.dtype or not weight.is_contiguous():
            return plain_norm(x, weight, eps)  # type: ignore[no-any-return]
        return flashinfer.rmsnorm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)  # type: ignore[no-any-return]

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See :func:`hal.ops.add_rms_norm`. FlashInfer overwrites both arguments, so both are copied."""
        if not _takes(x) or weight.dtype is not x.dtype or not weight.is_contiguous():
            return plain_add(x, residual, weight, eps)  # type: ignore[no-any-return]
        width = x.shape[-1]
        normed, hidden = (each.clone(memory_format=torch.contiguous_format) for each in (x, residual))
        flashinfer.fused_add_rmsnorm(normed.view(-1, width), hidden.view(-1, width), weight, eps)
        return normed, hidden

    def silu_and_mul(x: Tensor) -> Tensor:
        """See :func:`hal.ops.silu_and_mul`."""
        if not _takes(x) or x.shape[-1] // 2 * x.element_size() % VECTOR:
            return plain_silu(x)  # type: ignore[no-any-return]
        return flashinfer.silu_and_mul(x.contiguous())  # type: ignore[no-any-return]

    return {
        "add_rms_norm": add_rms_norm,
        "paged_attention": FlashInferAttention(device, otherwise["paged_attention"], in_graphs=in_graphs),
        "rms_norm": rms_norm,
        "silu_and_mul": silu_and_mul,
    }


def _takes(x: Tensor) -> bool:
    return x.dtype in HALVES and x.shape[-1] * x.element_size() % VECTOR == 0 and x.numel() > 0
