"""Query, key and value of a projection, with the norms and the rotary embedding of query and key."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor


def split_qkv_rmsnorm_rope(
    qkv: Tensor,
    sin: Tensor,
    cos: Tensor,
    q_size: int,
    kv_size: int,
    head_dim: int,
    eps: float | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query ``[tokens, q_size]``, key and value ``[tokens, kv_size]``; cos and sin have a row per token."""
    if q_bias is not None or k_bias is not None:
        raise NotImplementedError("the stand-in for sgl_kernel_npu has no biases of norms")
    query, key, value = qkv.split([q_size, kv_size, kv_size], dim=-1)
    rows = [each.reshape(-1, 1, head_dim).to(qkv.dtype) for each in (cos, sin)]
    rotated = []
    for part, weight in ((query, q_weight), (key, k_weight)):
        heads = part.reshape(part.shape[0], -1, head_dim)
        if weight is not None:
            heads = torch_npu.npu_rms_norm(heads, weight, eps)[0]
        left, right = heads.chunk(2, dim=-1)
        rotated.append((heads * rows[0] + torch.cat((-right, left), dim=-1) * rows[1]).reshape(part.shape))
    return rotated[0], rotated[1], value.contiguous()
