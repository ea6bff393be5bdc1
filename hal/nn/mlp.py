"""Multilayer perceptrons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from hal import ops
from hal.nn.linear import Linear, MergedLinear


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, the SwiGLU of Shazeer, *GLU Variants Improve Transformer*, 2020."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedLinear(hidden_size, parts, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, shard="in_features")

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[tokens, hidden_size]`` to the same shape."""
        return self.down_proj(ops.silu_and_mul(self.gate_up_proj(hidden)))

    if TYPE_CHECKING:
        __call__ = forward
