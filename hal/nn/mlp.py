"""Multilayer perceptrons, and their activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor, nn

from hal import ops
from hal.nn.linear import Linear, MergedLinear

Function = Callable[[Tensor], Tensor]
ActivationName = Literal["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2"]
"""The activations that config.json may name."""


def _relu2(x: Tensor) -> Tensor:
    return torch.relu(x).square()


def _gated(function: Function, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return function(gate) * up


ACTIVATIONS: Mapping[str, Function] = MappingProxyType(
    {
        "silu": partial(ops.pointwise, function="silu"),
        "gelu": partial(ops.gelu, approximate="none"),
        "gelu_new": partial(ops.gelu, approximate="tanh"),
        "gelu_pytorch_tanh": partial(ops.gelu, approximate="tanh"),
        "relu": torch.relu,
        "relu2": _relu2,
    }
)
"""Activations of :class:`MLP`, by name: ``[..., width]`` to the same shape."""
GATED_ACTIVATIONS: Mapping[str, Function] = MappingProxyType(
    {
        **{name: partial(_gated, function) for name, function in ACTIVATIONS.items()},
        "silu": ops.silu_and_mul,
        "gelu": partial(ops.gelu_and_mul, approximate="none"),
        "gelu_new": partial(ops.gelu_and_mul, approximate="tanh"),
        "gelu_pytorch_tanh": partial(ops.gelu_and_mul, approximate="tanh"),
    }
)
"""Activations of :class:`GatedMLP`, by name: gate and up as ``[..., 2 * width]``, to ``[..., width]``."""
assert ACTIVATIONS.keys() == set(get_args(ActivationName))


def limited_silu_and_mul(x: Tensor, limit: float) -> Tensor:
    """Return ``silu(gate) * up``, where gate is at most ``limit``, and the magnitude of up: an activation of GatedMLP.

    Args:
        x: ``[..., 2 * width]``, floating: gate and up.
        limit: the bound.

    Returns:
        ``[..., width]``, of x's dtype.

    Source: DeepSeek-AI, *DeepSeek-V4*, 2026.
    """
    gate, up = x.chunk(2, dim=-1)
    return ops.pointwise(gate.clamp(max=limit), "silu") * up.clamp(-limit, limit)


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))``, with SiLU the SwiGLU of Shazeer, *GLU Variants Improve Transformer*, 2020.

    Args:
        hidden_size: features of the input and of the output.
        intermediate_size: features between the projections.
        activation: its name in config.json; or a function, ``[..., 2 * width]`` to ``[..., width]``, such
            as ``partial(ops.clipped_silu_and_mul, alpha=1.702, limit=7.0, interleaved=False)``.
        bias: whether the projections have biases.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: ActivationName | Function = "silu",
        bias: bool = False,
    ) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.activation = GATED_ACTIVATIONS[activation] if isinstance(activation, str) else activation
        self.gate_up_proj = MergedLinear(hidden_size, parts, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, shard="in_features")

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[tokens, hidden_size]`` to the same shape."""
        return self.down_proj(self.activation(self.gate_up_proj(hidden)))

    if TYPE_CHECKING:
        __call__ = forward


class MLP(nn.Module):
    """``down(activation(up(x)))``.

    Args:
        hidden_size: features of the input and of the output.
        intermediate_size: features between the projections.
        activation: its name in config.json, or a function.
        bias: whether the projections have biases.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: ActivationName | Function,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation] if isinstance(activation, str) else activation
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias, shard="out_features")
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, shard="in_features")

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[tokens, hidden_size]`` to the same shape."""
        return self.down_proj(self.activation(self.up_proj(hidden)))

    if TYPE_CHECKING:
        __call__ = forward
