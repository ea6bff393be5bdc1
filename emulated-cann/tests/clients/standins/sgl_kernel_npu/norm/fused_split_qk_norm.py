"""The latent query, key and rotary key of a projection, with the norms of the first two."""

from __future__ import annotations

from typing import Any

import torch_npu
from torch import Tensor


def fused_split_qk_norm(
    latent: Tensor, q_norm: Any, kv_norm: Any, q_rank: int, kv_rank: int, rope: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query ``[tokens, q_rank]``, key ``[tokens, 1, kv_rank]`` and rotary key ``[tokens, 1, rope]``."""
    query, key, rotary = latent.split([q_rank, kv_rank, rope], dim=-1)
    query = torch_npu.npu_rms_norm(query.contiguous(), q_norm.weight, eps)[0]
    key = torch_npu.npu_rms_norm(key.contiguous(), kv_norm.weight, eps)[0]
    return query, key.unsqueeze(1), rotary.unsqueeze(1)
