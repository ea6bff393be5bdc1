"""Attention over plain keys and values, with npu_fused_infer_attention_score.

Source: torch_npu's documentation of ``npu_fused_infer_attention_score`` and ``npu_fusion_attention``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_npu
from torch import Tensor

from hal import ops
from hal.ops.kernels.kernel_table import Kernel
from hal.vendor import PreparingKernel

from .attention import CAUSAL, MASK_SIZE

SUPPORTED = (torch.bfloat16, torch.float16)


def kernels(device: torch.device) -> dict[str, Kernel]:
    """Return the kernel, by operation. A compiled model inverts each mask once, for all layers."""
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
        composed = softcap is not None or sinks is not None or query.dtype not in SUPPORTED
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

    attention = PreparingKernel(scaled_dot_product_attention, {"mask": torch.logical_not})
    return {"scaled_dot_product_attention": attention}
