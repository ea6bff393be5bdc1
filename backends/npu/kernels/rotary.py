"""Rotary embeddings: npu_rotary_mul, and npu_mrope where only a part of each head is rotated.

Sources: torch_npu's documentation of ``npu_rotary_mul`` and ``npu_mrope``.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from hal.ops.kernels.kernel_table import Kernel
from hal.vendor import PreparingKernel

MULTIPLE = 32
"""What the head dimension and the number of rotated elements are multiples of in npu_mrope, in 16 bits."""
ROWS = 1 << 16
"""The most tokens for which :class:`PartialRotary` has numbers."""


def kernel(device: torch.device, *, partial: bool) -> Kernel:
    """Return the kernel of ``rotary_embedding``.

    Args:
        device: the NPU.
        partial: whether it has npu_mrope.
    """
    if not partial:
        return rotary_embedding
    return PreparingKernel(PartialRotary(device).rotary_embedding, {"cos": _halves, "sin": _pairs})


def _fits(query: Tensor, key: Tensor, cos: Tensor) -> bool:
    """Return whether npu_mrope rotates both."""
    width, head_dim = cos.shape[-1], query.shape[-1]
    sizes = width < head_dim and width % MULTIPLE == 0 and head_dim % MULTIPLE == 0
    return sizes and cos.dtype is query.dtype and 0 < query.shape[0] <= ROWS and key.shape[1] > 0


def _halves(cos: Tensor, sin: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the angles of pairs in both halves as npu_mrope's cache: a row of cos and sin for each token."""
    half = cos.shape[-1] // 2
    return torch.cat((cos[:, :half], sin[:, :half]), -1) if _fits(query, key, cos) else cos


def _pairs(sin: Tensor, cos: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return those of adjacent pairs."""
    return torch.cat((cos[:, ::2], sin[:, ::2]), -1) if _fits(query, key, cos) else sin


class PartialRotary:
    """``rotary_embedding``, in one launch for query and key if a part of each head is rotated."""

    def __init__(self, device: torch.device) -> None:
        self._rows = torch.arange(ROWS).to(device)

    def rotary_embedding(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See :func:`hal.ops.rotary_embedding`. Cos and sin are those of :func:`_halves` and :func:`_pairs`."""
        if not _fits(query, key, cos):
            return rotary_embedding(query, key, cos, sin, interleaved)
        tokens, _, head_dim = query.shape
        rotated = torch_npu.npu_mrope(
            self._rows[:tokens],
            query.reshape(tokens, -1),
            key.reshape(tokens, -1),
            sin if interleaved else cos,
            head_dim,
            mrope_section=[0, 0, 0],
            rotary_mode="interleave" if interleaved else "half",
        )
        query, key = (each.view(tokens, -1, head_dim) for each in rotated)
        return query, key


def rotary_embedding(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """See :func:`hal.ops.rotary_embedding`. npu_apply_rotary_pos_emb is not used: it writes to its inputs.

    npu_rotary_mul takes tensors of one dtype, so float32 angles rotate a copy in float32. Query and key that follow
    each other in a merged projection are rotated together if each takes several launches: what is rotated together has
    to be copied apart for attention and the cache.
    """
    one_launch = cos.dtype is query.dtype and cos.shape[-1] == query.shape[-1]
    if not one_launch and (heads := _adjacent(query, key)) is not None:
        rotated, _ = rotary_embedding(heads, heads[:, :0], cos, sin, interleaved)
        return rotated[:, : query.shape[1]], rotated[:, query.shape[1] :]
    cos, sin, mode = cos[None, :, None], sin[None, :, None], "interleave" if interleaved else "half"
    if not key.shape[1]:
        whole = query if cos.dtype is query.dtype else query.float()
        return _rotated(whole, cos, sin, mode).to(query.dtype), key
    if cos.dtype is query.dtype:
        return _rotated(query, cos, sin, mode), _rotated(key, cos, sin, mode)
    rotated, rotated_key = (_rotated(each.float(), cos, sin, mode).to(query.dtype) for each in (query, key))
    return rotated, rotated_key


def _adjacent(query: Tensor, key: Tensor) -> Tensor | None:
    """Return the heads of query and key as one tensor, if they follow each other in memory; else None."""
    tokens, heads, head_dim = query.shape
    end = query.storage_offset() + heads * head_dim
    # By identity, since tensors of a trace have storages without an address.
    alike = query.untyped_storage()._cdata == key.untyped_storage()._cdata and query.stride() == key.stride()
    if not key.shape[1] or not alike or key.storage_offset() != end or query.stride()[1:] != (head_dim, 1):
        return None
    return query.as_strided((tokens, heads + key.shape[1], head_dim), query.stride())


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    """Rotate the first elements of each head, two launches more than to rotate all of them."""
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return torch_npu.npu_rotary_mul(x.unsqueeze(0), cos, sin, mode).squeeze(0)  # type: ignore[no-any-return]
    rotated = torch_npu.npu_rotary_mul(x[None, ..., :width].contiguous(), cos, sin, mode).squeeze(0)
    return torch.cat((rotated, x[..., width:]), dim=-1)
