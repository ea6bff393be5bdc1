"""Draws the cases of test_aten.py from a seed: shapes, values, strides and offsets.

An input maker takes a :class:`Draw` and returns a CPU tensor of the tested dtype, or another argument. Makers run in
order; later ones may use `draw.shape`, the shape of the case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)
NUMBERS = FLOATS + INTEGERS
ALL = (*NUMBERS, torch.bool)

SHAPES = ((), (1,), (7,), (0,), (4, 8), (3, 0, 2), (1, 5), (2, 3, 4), (2, 1, 3, 5))


class Draw:
    """The random parts of a case: its shape, and numbers from its seed."""

    def __init__(self, seed: int, dtype: torch.dtype, dims: int, empty: bool) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        shapes = [each for each in SHAPES if len(each) >= dims and (empty or 0 not in each)]
        self.shape: tuple[int, ...] = shapes[self.below(len(shapes))]

    def below(self, end: int) -> int:
        return int(torch.randint(end, (), generator=self.generator))

    def numbers(
        self, shape: Sequence[int], low: float = -3, high: float = 3, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return numbers of the tested dtype; integers, if it is an integer dtype."""
        dtype = dtype or self.dtype
        if dtype == torch.bool:
            return torch.randint(2, tuple(shape), generator=self.generator).bool()
        if not dtype.is_floating_point:
            return torch.randint(round(low), round(high) + 1, tuple(shape), generator=self.generator, dtype=dtype)
        return (torch.rand(tuple(shape), generator=self.generator, dtype=torch.float64) * (high - low) + low).to(dtype)

    def laid_out(self, tensor: Tensor) -> Tensor:
        """Return the same values with other strides and a storage offset."""
        kind = self.below(5)
        if kind == 0 or tensor.dim() == 0:
            return tensor.clone()
        if kind == 1:  # transposed
            return tensor.transpose(0, -1).contiguous().transpose(0, -1)
        if kind == 2:  # every other element, from an offset
            wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] * 2 + 3, dtype=tensor.dtype)
            view = wide[..., 3 : 3 + 2 * tensor.shape[-1] : 2]
        elif kind == 3:  # some rows of a larger tensor
            view = torch.zeros(tensor.shape[0] + 2, *tensor.shape[1:], dtype=tensor.dtype)[1:-1]
        else:  # columns of a larger tensor
            view = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 5, dtype=tensor.dtype)[..., 2:-3]
        view.copy_(tensor)
        return view


Maker = Callable[[Draw], Any]


def tensor(low: float = -3, high: float = 3, dtype: torch.dtype | None = None) -> Maker:
    """Return a tensor of the case's shape."""
    return lambda draw: draw.laid_out(draw.numbers(draw.shape, low, high, dtype))


def broadcast(low: float = -3, high: float = 3) -> Maker:
    """Return a tensor that broadcasts to the case's shape."""

    def make(draw: Draw) -> Tensor:
        shape = [1 if draw.below(4) == 0 else size for size in draw.shape][draw.below(len(draw.shape) + 1) :]
        return draw.laid_out(draw.numbers(shape, low, high))

    return make


def distinct(draw: Draw) -> Tensor:
    """Return a tensor of the case's shape without equal elements, so that its order is unique."""
    count = torch.Size(draw.shape).numel()
    values = torch.randperm(count, generator=draw.generator).reshape(draw.shape)
    return draw.laid_out((values - count // 2).to(draw.dtype))


def sized(*shape: int, low: float = -1, high: float = 1, dtype: torch.dtype | None = None) -> Maker:
    """Return a tensor of this shape."""
    return lambda draw: draw.laid_out(draw.numbers(shape, low, high, dtype))


def index(*shape: int, end: int) -> Maker:
    """Return indices below `end`."""
    return lambda draw: draw.laid_out(torch.randint(end, shape, generator=draw.generator))


def permutation(size: int) -> Maker:
    """Return indices without repetition."""
    return lambda draw: torch.randperm(size, generator=draw.generator)


def mask(draw: Draw) -> Tensor:
    """Return booleans of the case's shape."""
    return draw.laid_out(draw.numbers(draw.shape, dtype=torch.bool))


def const(value: Any) -> Maker:
    """Return a constant argument."""
    return lambda draw: value


def dim(draw: Draw) -> int:
    """Return a dimension of the case's shape."""
    count = max(len(draw.shape), 1)
    return draw.below(2 * count) - count


@attrs.frozen
class Case:
    """One operation.

    Attributes:
        function: called with device tensors, and with the reference's.
        inputs: input makers of its arguments.
        dtypes: the dtypes of its main inputs.
        dims: the minimum number of dimensions of its shape.
        empty: whether a dimension may be 0.
        inplace: whether its first argument is mutated, and compared too.
        scale: the factor on the usual tolerance; the case has the reason.
    """

    name: str
    function: Callable[..., Any]
    inputs: Sequence[Maker]
    dtypes: Sequence[torch.dtype] = FLOATS
    dims: int = 0
    empty: bool = True
    inplace: bool = False
    scale: float = 1
