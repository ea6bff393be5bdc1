"""How the cases of test_aten.py are drawn: shapes, values, strides and offsets, by a seed.

An input maker takes a :class:`Draw` and returns a CPU tensor, in the type that is being tested, or an argument that is
no tensor. Makers run in order; later ones may look at `draw.shape`, the shape of the case.
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
    """What is random in one case: its shape, and numbers by its seed."""

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
        """Numbers of the type under test; integers, if that is their type."""
        dtype = dtype or self.dtype
        if dtype == torch.bool:
            return torch.randint(2, tuple(shape), generator=self.generator).bool()
        if not dtype.is_floating_point:
            return torch.randint(round(low), round(high) + 1, tuple(shape), generator=self.generator, dtype=dtype)
        return (torch.rand(tuple(shape), generator=self.generator, dtype=torch.float64) * (high - low) + low).to(dtype)

    def laid_out(self, tensor: Tensor) -> Tensor:
        """The same values behind other strides and a storage offset."""
        kind = self.below(5)
        if kind == 0 or tensor.dim() == 0:
            return tensor.clone()
        if kind == 1:  # transposed
            return tensor.transpose(0, -1).contiguous().transpose(0, -1)
        if kind == 2:  # every other element, from an offset on
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
    """A tensor of the case's shape."""
    return lambda draw: draw.laid_out(draw.numbers(draw.shape, low, high, dtype))


def broadcast(low: float = -3, high: float = 3) -> Maker:
    """A tensor that broadcasts to the case's shape."""

    def make(draw: Draw) -> Tensor:
        shape = [1 if draw.below(4) == 0 else size for size in draw.shape][draw.below(len(draw.shape) + 1) :]
        return draw.laid_out(draw.numbers(shape, low, high))

    return make


def distinct(draw: Draw) -> Tensor:
    """A tensor of the case's shape without equal elements, so that its order is unique."""
    count = torch.Size(draw.shape).numel()
    values = torch.randperm(count, generator=draw.generator).reshape(draw.shape)
    return draw.laid_out((values - count // 2).to(draw.dtype))


def sized(*shape: int, low: float = -1, high: float = 1, dtype: torch.dtype | None = None) -> Maker:
    """A tensor of this shape."""
    return lambda draw: draw.laid_out(draw.numbers(shape, low, high, dtype))


def index(*shape: int, end: int) -> Maker:
    """Indices below `end`."""
    return lambda draw: draw.laid_out(torch.randint(end, shape, generator=draw.generator))


def permutation(size: int) -> Maker:
    """Indices without repetition."""
    return lambda draw: torch.randperm(size, generator=draw.generator)


def mask(draw: Draw) -> Tensor:
    """ReferenceLogits values of the case's shape."""
    return draw.laid_out(draw.numbers(draw.shape, dtype=torch.bool))


def const(value: Any) -> Maker:
    """An argument that is the same every time."""
    return lambda draw: value


def dim(draw: Draw) -> int:
    """A dimension of the case's shape."""
    count = max(len(draw.shape), 1)
    return draw.below(2 * count) - count


@attrs.frozen
class Case:
    """One operation.

    Attributes:
        function: called with tensors of the device, and with those of the reference.
        inputs: makers of its arguments.
        dtypes: of its main inputs.
        dims: the fewest dimensions its shape may have.
        empty: whether a dimension may be 0.
        out: whether it takes `out=`, or a tuple of as many.
        inplace: whether its first argument is changed, and compared too.
        scale: how many times the usual tolerance it needs, and why is said at the case.
    """

    name: str
    function: Callable[..., Any]
    inputs: Sequence[Maker]
    dtypes: Sequence[torch.dtype] = FLOATS
    dims: int = 0
    empty: bool = True
    out: bool = False
    inplace: bool = False
    scale: float = 1
