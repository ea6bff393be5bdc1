"""Attention without a cache, over plain and over packed sequences, with npu_fused_infer_attention_score.

Source: torch_npu's documentation of ``npu_fused_infer_attention_score`` and ``npu_fusion_attention``.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from hal import ops
from hal.ops.kernels.kernel_table import Kernel
from hal.vendor import PreparingKernel

from .attention import CAUSAL, MASK_SIZE, MAX_PACKED, PACKED_DTYPE

HEAD_DIMS = (64, 128)
"""Head dimensions that every release of CANN supports in TND. Others are padded with zeros, which add 0 to scores."""
MULTIPLE, LARGEST = 16, 512
"""Head dimensions in BNSD are multiples of the first, up to the second."""
DTYPES = (torch.bfloat16, torch.float16)


class _Reference:
    updates = fixes_queries = False  # It reads all lengths on the device.

    def __call__(self, *arguments: Any) -> Tensor:
        found: Tensor = ops.operation("packed_attention").reference(*arguments)
        return found


class PackedAttention:
    """``packed_attention``.

    In bfloat16 and with heads of at most 128 elements it is one launch in TND, which a graph updates. Else, in 16 bits
    and with heads of at most 512, it is a launch in BNSD for each run of equally long sequences, and the reference in a
    capture, which reads lengths on the device. The reference runs for float32 and larger heads.

    Args:
        causal_mask: hides what the operator's causal mode hides.
    """

    def __init__(self, causal_mask: Tensor) -> None:
        self._causal_mask = causal_mask
        self._reference = _Reference()

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_start_loc: Tensor,
        query_start_loc_host: Tensor,
        scale: float,
        causal: bool,
    ) -> Tensor:
        """See :func:`hal.ops.packed_attention`."""
        arguments = query, key, value, query_start_loc, query_start_loc_host, scale, causal
        kernel = self.chosen(*arguments)
        if kernel is self._reference:
            return self._reference(*arguments)
        starts = query_start_loc_host.tolist()
        used, head_dim = starts[-1], query.shape[2]
        together = kernel == self._packed
        rows = [each[:used] for each in (query, key, value)]
        padded = _padded(head_dim, packed=together)
        if padded > head_dim:
            rows = [functional.pad(each, (0, padded - head_dim)) for each in rows]
        attended: Tensor = kernel(rows, starts, scale, causal)
        if left := query.shape[0] - used:
            attended = functional.pad(attended, (0, 0, 0, 0, 0, left))
        return attended[..., :head_dim].contiguous() if padded > head_dim else attended

    def chosen(self, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, host: Tensor, *options: Any) -> Kernel:
        """Return what runs for some arguments."""
        head_dim, sequences, used = query.shape[2], len(host) - 1, host.tolist()[-1]
        if not used or not 0 < sequences <= MAX_PACKED or query.dtype not in DTYPES or head_dim > LARGEST:
            return self._reference
        if query.dtype is PACKED_DTYPE and head_dim <= HEAD_DIMS[-1]:
            return self._packed
        return self._reference if torch_npu.npu.is_current_stream_capturing() else self._one_by_one

    def _packed(self, rows: list[Tensor], starts: list[int], scale: float, causal: bool) -> Tensor:
        queries, keys, values = (each.contiguous() for each in rows)
        lengths = {"actual_seq_lengths": starts[1:], "actual_seq_lengths_kv": starts[1:]}
        return self._attend(queries, keys, values, "TND", queries.shape[1], keys.shape[1], scale, causal, **lengths)

    def _one_by_one(self, rows: list[Tensor], starts: list[int], scale: float, causal: bool) -> Tensor:
        found, start = [], 0
        for length, run in groupby(end - begin for begin, end in pairwise(starts)):
            count = len(list(run))
            own = slice(start, start := start + count * length)
            if not length:
                continue
            queries, keys, values = (
                each[own].unflatten(0, (count, length)).transpose(1, 2).contiguous() for each in rows
            )
            heads, kv_heads = queries.shape[1], keys.shape[1]
            attended = self._attend(queries, keys, values, "BNSD", heads, kv_heads, scale, causal and length > 1)
            found.append(attended.transpose(1, 2).flatten(0, 1))
        return torch.cat(found)

    def _attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        layout: str,
        heads: int,
        kv_heads: int,
        scale: float,
        causal: bool,
        **lengths: list[int],
    ) -> Tensor:
        masked: dict[str, Any] = {"atten_mask": self._causal_mask, "sparse_mode": CAUSAL} if causal else {}
        return torch_npu.npu_fused_infer_attention_score(  # type: ignore[no-any-return]
            queries,
            keys,
            values,
            num_heads=heads,
            num_key_value_heads=kv_heads,
            scale=scale,
            input_layout=layout,
            **lengths,
            **masked,
        )[0]


def _padded(head_dim: int, *, packed: bool) -> int:
    """Return the head dimension that a launch takes."""
    if packed:
        return next(each for each in HEAD_DIMS if each >= head_dim)
    return -(-head_dim // MULTIPLE) * MULTIPLE


def kernels(device: torch.device) -> dict[str, Kernel]:
    """Return the kernels, by operation. A compiled model inverts each mask once, for all layers."""
    # Copied to the device here, because a capture does not allow the copy.
    causal_mask = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool).triu_(1).to(device)

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        causal: bool,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.scaled_dot_product_attention`. The mask is True where a query does not attend.

        One launch; in a capture that of npu_fusion_attention, because torch_npu expects to update the other's lengths
        at each replay. The reference runs for other dtypes than bfloat16 and float16, for a mask with ``causal``,
        and with softcaps or sinks, which the operator lacks.
        """
        queries, hides = query.shape[2], causal and query.shape[2] > 1
        composed = softcap is not None or sinks is not None or query.dtype not in DTYPES
        if composed or (mask is not None and hides) or not query.numel():
            plain = None if mask is None else mask.logical_not()
            return ops.operation("scaled_dot_product_attention").reference(  # type: ignore[no-any-return]
                query, key, value, plain, scale, causal, softcap, sinks
            )
        masked: dict[str, Any] = {}
        if hides:
            masked = {"atten_mask": causal_mask, "sparse_mode": CAUSAL}
        elif mask is not None:
            masked = {"atten_mask": mask.contiguous()}
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        if torch_npu.npu.is_current_stream_capturing():
            return torch_npu.npu_fusion_attention(  # type: ignore[no-any-return]
                query, key, value, query.shape[1], "BNSD", scale=scale, **masked
            )[0]
        if queries == 1 and mask is not None:
            masked["atten_mask"] = masked["atten_mask"][:, 0, 0]
        return torch_npu.npu_fused_infer_attention_score(  # type: ignore[no-any-return]
            query,
            key,
            value,
            num_heads=query.shape[1],
            num_key_value_heads=key.shape[1],
            input_layout="BNSD",
            scale=scale,
            **masked,
        )[0]

    return {
        "packed_attention": PackedAttention(causal_mask),
        "scaled_dot_product_attention": PreparingKernel(scaled_dot_product_attention, {"mask": torch.logical_not}),
    }
