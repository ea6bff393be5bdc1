"""Activation functions."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.nn import functional

from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op
from hal.ops.declaration.samples import Draw, Sample


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
