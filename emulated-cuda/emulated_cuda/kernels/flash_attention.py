"""A CPU kernel for torch's flash attention, which has none."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import attend

_library = torch.library.Library("aten", "IMPL")


def register() -> None:
    """Register the kernel. The emulated CUDA kernel is derived from it like those of all other operators."""
    _library.impl("_flash_attention_forward", _forward, "CPU")


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Implement ``aten::_flash_attention_forward`` for packed sequences, as hal calls it."""
    if (
        cum_seq_q is None
        or cum_seq_k is None
        or scale is None
        or dropout_p
        or (seqused_k, alibi_slopes) != (None, None)
    ):
        raise NotImplementedError("the emulated flash attention needs start offsets of sequences and a scale")
    made = torch.zeros_like(query)
    for row in range(cum_seq_q.numel() - 1):
        tokens = slice(int(cum_seq_q[row]), int(cum_seq_q[row + 1]))
        cached = slice(int(cum_seq_k[row]), int(cum_seq_k[row + 1]))
        causal = is_causal or window_size_right == 0
        window = -1 if window_size_left is None else window_size_left
        made[tokens] = attend(query[tokens], key[cached], value[cached], scale, causal=causal, window=window).to(
            made.dtype
        )
    sums = query.new_zeros(query.shape[1], query.shape[0], dtype=torch.float32)
    state, unused = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return made, sums, state, unused, query.new_empty(0)
