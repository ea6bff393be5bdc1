"""Activation functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Literal, get_args

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from hal.errors import OperationError, nearest
from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op


def _silu_samples(draw: Draw) -> Iterator[Sample]:
    for shape in ((1, 64), (19, 256), (2, 3, 32), (0, 8)):
        yield (draw.normal(*shape),)
    yield (draw.normal(3, 64, scale=30.0),)  # where the sigmoid saturates


@op(
    samples=_silu_samples,
    axes={"x": "... merged", "return": "... merged//2"},
    dtypes={"x": FLOATING, "return": "x"},
    rowwise="...",
)
def silu_and_mul(x: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, where the first half of ``x`` is the gate. Computed in float32, and rounded once.

    Args:
        x: ``[..., 2 * width]``, floating.

    Returns:
        ``[..., width]``, of x's dtype.

    Source: Shazeer, *GLU Variants Improve Transformer*, 2020 (SwiGLU).
    """
    gate, up = x.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype)


def _gelu_samples(draw: Draw) -> Iterator[Sample]:
    for (x,) in _silu_samples(draw):
        for approximate in ("none", "tanh"):
            yield x, approximate


@op(
    samples=_gelu_samples,
    axes={"x": "... width", "return": "... width"},
    dtypes={"x": FLOATING, "return": "x"},
    rowwise="...",
)
def gelu(x: Tensor, approximate: str) -> Tensor:
    """Return ``x * Phi(x)``, the Gaussian error linear unit. Computed in float32, and rounded once.

    Args:
        x: floating.
        approximate: ``none`` for the error function, or ``tanh`` for its approximation, as in torch.

    Returns:
        A tensor of x's shape and dtype.

    Source: Hendrycks and Gimpel, *Gaussian Error Linear Units (GELUs)*, 2016.
    """
    return functional.gelu(x.float(), approximate=approximate).to(x.dtype)


@op(
    samples=_gelu_samples,
    axes={"x": "... merged", "return": "... merged//2"},
    dtypes={"x": FLOATING, "return": "x"},
    rowwise="...",
)
def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    """Return ``gelu(gate) * up``, where the first half of ``x`` is the gate. Computed in float32, and rounded once.

    Args:
        x: ``[..., 2 * width]``, floating.
        approximate: as in :func:`gelu`.

    Returns:
        ``[..., width]``, of x's dtype.

    Source: Shazeer, *GLU Variants Improve Transformer*, 2020 (GEGLU).
    """
    gate, up = x.float().chunk(2, dim=-1)
    return (functional.gelu(gate, approximate=approximate) * up).to(x.dtype)


def _clipped_samples(draw: Draw) -> Iterator[Sample]:
    for (x,) in _silu_samples(draw):
        for interleaved in (False, True):
            yield x, 1.702, 7.0, interleaved
    yield draw.normal(4, 64, scale=3.0), 1.0, 2.5, False


@op(
    samples=_clipped_samples,
    axes={"x": "... merged", "return": "... merged//2"},
    dtypes={"x": FLOATING, "return": "x"},
    rowwise="...",
)
def clipped_silu_and_mul(x: Tensor, alpha: float, limit: float, interleaved: bool) -> Tensor:
    """Return ``gate * sigmoid(alpha * gate) * (up + 1)``, where gate is at most, and up between, the limits.

    Computed in float32, and rounded once.

    Args:
        x: ``[..., 2 * width]``, floating.
        alpha: factor of the sigmoid's argument.
        limit: the maximum of the gate and of the magnitude of up.
        interleaved: whether the gate is in the even columns of ``x`` and up in the odd ones; else in its halves.

    Returns:
        ``[..., width]``, of x's dtype.

    Source: OpenAI, *gpt-oss-120b & gpt-oss-20b Model Card*, 2025, and its published code.
    """
    wide = x.float()
    gate, up = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(x.dtype)


Pointwise = Literal["cos", "sigmoid", "silu", "sin", "softplus", "tanh"]
"""The names of the functions of :func:`pointwise`."""
_POINTWISE: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "cos": torch.cos,
        "sigmoid": torch.sigmoid,
        "silu": functional.silu,
        "sin": torch.sin,
        "softplus": functional.softplus,
        "tanh": torch.tanh,
    }
)
assert _POINTWISE.keys() == set(get_args(Pointwise))


def _pointwise_samples(draw: Draw) -> Iterator[Sample]:
    for function in _POINTWISE:
        yield draw.normal(5, 48), function
    yield draw.normal(2, 3, 7, scale=4.0), "sigmoid"
    yield draw.normal(0, 16), "tanh"


@op(
    samples=_pointwise_samples,
    axes={"x": "... width", "return": "... width"},
    dtypes={"x": FLOATING, "return": "x"},
    rowwise="...",
)
def pointwise(x: Tensor, function: str) -> Tensor:
    """Return a function of each element, as torch computes it.

    Models call it in place of torch's functions that round, because libraries round some elements of a tensor
    otherwise than others, by their place in it: an element then depends on the number of rows.

    Args:
        x: ``[..., width]``, floating.
        function: ``cos``, ``sigmoid``, ``silu``, ``sin``, ``softplus`` or ``tanh``.

    Returns:
        A tensor of x's shape and dtype.

    Raises:
        OperationError: there is no such function.
    """
    if function not in _POINTWISE:
        raise OperationError(f"pointwise has no function {function!r}", nearest(function, _POINTWISE))
    return _POINTWISE[function](x)


@attrs.frozen
class GatedActivation:
    """The choice of a gated activation, which an operation and its kernels pass on as one object.

    It is :func:`silu_and_mul`, unless the attributes choose another one.

    Attributes:
        approximate: chooses :func:`gelu_and_mul`, of which it is the argument.
        alpha: with ``limit``, chooses :func:`clipped_silu_and_mul`, of which both are arguments.
        limit: see ``alpha``.
        interleaved: as in :func:`clipped_silu_and_mul`; False without ``alpha``.

    Raises:
        OperationError: the attributes choose no activation, or more than one.
    """

    approximate: str | None = None
    alpha: float | None = None
    limit: float | None = None
    interleaved: bool = False

    def __attrs_post_init__(self) -> None:
        clipped = self.alpha is not None
        if clipped != (self.limit is not None) or (self.approximate is not None if clipped else self.interleaved):
            raise OperationError(
                f"{self} is not an activation", "set approximate, or alpha and limit with or without interleaved"
            )

    def apply(
        self,
        merged: Tensor,
        silu_and_mul: Callable[[Tensor], Tensor],
        gelu_and_mul: Callable[[Tensor, str], Tensor],
        clipped_silu_and_mul: Callable[[Tensor, float, float, bool], Tensor],
    ) -> Tensor:
        """Return the activations of ``[..., 2 * width]`` that the chosen one of three functions computes."""
        if self.alpha is not None and self.limit is not None:
            return clipped_silu_and_mul(merged, self.alpha, self.limit, self.interleaved)
        return silu_and_mul(merged) if self.approximate is None else gelu_and_mul(merged, self.approximate)
