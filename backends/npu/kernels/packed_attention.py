"""Attention over packed sequences without a cache, with npu_fused_infer_attention_score in the layout TND.

Source: torch_npu's documentation of ``npu_fused_infer_attention_score``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from hal import ops
from hal.ops.kernels.kernel_table import Kernel

from .attention import CAUSAL, MASK_SIZE, MAX_PACKED, PACKED_DTYPE

HEAD_DIMS = (64, 128)
"""Head dimensions that every release of CANN supports in TND. Others are padded with zeros, which add 0 to scores."""


def kernels(device: torch.device) -> dict[str, Kernel]:
    """Return the kernel, by operation."""
    # Copied to the device here, because a capture does not allow the copy.
    causal_mask = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool).triu_(1).to(device)

    def packed_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_start_loc: Tensor,
        query_start_loc_host: Tensor,
        scale: float,
        causal: bool,
    ) -> Tensor:
        """See :func:`hal.ops.packed_attention`. One launch, in bfloat16 and with heads of at most 128 elements.

        The reference runs for other dtypes and larger heads.
        """
        tokens, heads, head_dim = query.shape
        ends = query_start_loc_host[1:].tolist()
        padded = next((each for each in HEAD_DIMS if each >= head_dim), None)
        if query.dtype is not PACKED_DTYPE or padded is None or not 0 < len(ends) <= MAX_PACKED or not ends[-1]:
            return ops.operation("packed_attention").reference(  # type: ignore[no-any-return]
                query, key, value, query_start_loc, query_start_loc_host, scale, causal
            )
        masked: dict[str, Any] = {"atten_mask": causal_mask, "sparse_mode": CAUSAL} if causal else {}
        rows = [each[: ends[-1]] for each in (query, key, value)]
        if padded > head_dim:
            rows = [functional.pad(each, (0, padded - head_dim)) for each in rows]
        queries, keys, values = (each.contiguous() for each in rows)
        attended: Tensor = torch_npu.npu_fused_infer_attention_score(
            queries,
            keys,
            values,
            num_heads=heads,
            num_key_value_heads=key.shape[1],
            scale=scale,
            input_layout="TND",
            actual_seq_lengths=ends,
            actual_seq_lengths_kv=ends,
            **masked,
        )[0]
        left = tokens - ends[-1]
        if left:
            attended = functional.pad(attended, (0, 0, 0, 0, 0, left))
        return attended[..., :head_dim].contiguous() if padded > head_dim else attended

    return {"packed_attention": packed_attention}
