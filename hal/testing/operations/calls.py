"""Calls of an operation to be examined: its samples, and what is derived from them without a word from its author."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hal.ops.declaration.axes import LEADING, STEP_AXES, Shape
from hal.ops.declaration.operation import Operation
from hal.ops.declaration.samples import Draw, Sample

Transform = Callable[[Sample], Sample]


@attrs.frozen
class Call:
    """One call: a sample of an operation, changed in some way.

    Attributes:
        operation: that is called.
        dtype: that its sample is drawn in.
        number: of the sample.
        variant: names the call among those of its operation and dtype.
        transform: changes the sample's arguments.
    """

    operation: Operation
    dtype: torch.dtype
    number: int
    variant: str
    transform: Transform = attrs.field(default=lambda sample: sample)

    def arguments(self, device: torch.device | str, seed: int = 0) -> list[Any]:
        """The arguments on a device; those for the host on the CPU, in memory of their own."""
        drawn = self.transform(nth_sample(self.operation, Draw(self.dtype, device, seed), self.number))
        names = zip(self.operation.signature.parameters, drawn, strict=True)
        return [value.cpu().clone() if name in self.operation.host else value for name, value in names]


def nth_sample(operation: Operation, draw: Draw, number: int) -> Sample:
    """One of an operation's samples."""
    return next(iter(islice(operation.samples(draw), number, None)))


@lru_cache(maxsize=512)
def sample_count(operation: Operation) -> int:
    """How many samples an operation declares."""
    return sum(1 for _ in operation.samples(Draw()))


def calls_of(operation: Operation, dtype: torch.dtype) -> Iterator[Call]:
    """Every sample; and of one that has rows, a single row, none, large values, and values that are no numbers."""
    for number in range(sample_count(operation)):
        yield Call(operation, dtype, number, f"sample-{number}")
    yield Call(operation, dtype, widest(operation), "rows-apart", partial(rows_apart, operation))
    several = with_rows(operation)
    if several is None or operation.host:  # whose lengths would no longer be those of the rows
        return
    for count in (1, 0):
        yield Call(operation, dtype, several, f"rows-{count}", partial(first_rows, operation, count))
    yield Call(operation, dtype, several, "large", partial(scaled, operation, 4096.0))


def special_calls_of(operation: Operation, dtype: torch.dtype) -> Iterator[Call]:
    """Where results are floating, one row with NaN, and one with an infinity."""
    number = with_rows(operation)
    if number is None:
        return
    sample = nth_sample(operation, Draw(), number)
    if first_floating(operation, sample) is not None and _floats(reference(operation, copied(sample))):
        for name, value in (("nan", float("nan")), ("infinity", float("inf"))):
            yield Call(operation, dtype, number, name, partial(with_special, operation, value))


@lru_cache(maxsize=512)
def widest(operation: Operation) -> int:
    """The number of the sample with the most elements."""
    sizes = [sum(each.numel() for each in tensors(sample)) for sample in operation.samples(Draw())]
    return max(range(len(sizes)), key=sizes.__getitem__)


@lru_cache(maxsize=512)
def with_rows(operation: Operation) -> int | None:
    """The number of the first sample with several rows; None if the operation does not compute row by row."""
    for number, sample in enumerate(operation.samples(Draw())):
        places = row_dims(operation, sample)
        if any(sample[place].shape[dim] > 1 for place, dim in places.items()):
            return number
    return None


def row_dims(operation: Operation, sample: Sample) -> dict[int, int]:
    """Which arguments have the axis over which the operation computes row by row, and which dimension it is there."""
    found = {}
    for place, (name, value) in enumerate(zip(operation.constraints.arguments, sample, strict=True)):
        dim = _row_dim(operation, operation.constraints.shape(name), value)
        if dim is not None:
            found[place] = dim
    return found


def result_row_dims(operation: Operation, results: Sequence[Tensor]) -> list[int | None]:
    """The dimension of that axis in each result."""
    return [_row_dim(operation, *each) for each in zip(operation.constraints.results, results, strict=True)]


def _row_dim(operation: Operation, shape: Shape | None, value: Any) -> int | None:
    if operation.rowwise is None or shape is None or not isinstance(value, Tensor):
        return None
    return shape.dim(operation.rowwise, value.dim())


def first_rows(operation: Operation, count: int, sample: Sample) -> Sample:
    """The arguments that have rows, cut to the first ones."""
    dims = row_dims(operation, sample)
    return tuple(value.narrow(dims[place], 0, count) if place in dims else value for place, value in enumerate(sample))


def rows_apart(operation: Operation, sample: Sample) -> Sample:
    """Every floating argument of two dimensions or more as a slice of a wider tensor, as of a merged projection.

    Weights and state stay as they are: their layout is not the caller's to choose.
    """

    def apart(name: str, value: Any) -> Any:
        shape = operation.constraints.shape(name)
        if shape is None or not isinstance(value, Tensor) or value.dim() < 2 or not value.is_floating_point():
            return value
        if {*operation.state, *operation.host} & {name} or not _of_a_step(operation, shape):
            return value
        width = value.shape[-1]
        wide = value.new_full((*value.shape[:-1], 3 * width), float("nan"))
        wide[..., width : 2 * width] = value
        return wide[..., width : 2 * width]

    return tuple(apart(name, value) for name, value in zip(operation.signature.parameters, sample, strict=True))


def _of_a_step(operation: Operation, shape: Shape) -> bool:
    """Whether a tensor is made anew at each step, as its axes tell."""
    return not {*STEP_AXES, LEADING, operation.rowwise}.isdisjoint(shape.names)


def scaled(operation: Operation, factor: float, sample: Sample) -> Sample:
    """The first floating argument with rows times the largest power of two that leaves finite results."""
    place = first_floating(operation, sample)
    if place is None:
        return sample
    on_cpu = tuple(value.cpu() if isinstance(value, Tensor) else value for value in sample)
    while factor > 1:
        given = list(copied(on_cpu))
        given[place] = given[place] * factor
        finite = [given[place], *_floats(reference(operation, given))]
        if all(bool(each.isfinite().all()) for each in finite):
            break
        factor /= 2
    return tuple(value * factor if at == place else value for at, value in enumerate(sample))


def with_special(operation: Operation, special: float, sample: Sample) -> Sample:
    """The first row of the first floating argument with rows begins with ``special``."""
    place = first_floating(operation, sample)
    if place is None:
        return sample
    changed = sample[place].clone()
    row = changed.select(row_dims(operation, sample)[place], 0)
    row[(0,) * row.dim()] = special
    return tuple(changed if at == place else value for at, value in enumerate(sample))


def first_floating(operation: Operation, sample: Sample) -> int | None:
    """The first floating argument that has rows."""
    return next((place for place in row_dims(operation, sample) if sample[place].is_floating_point()), None)


def reference(operation: Operation, sample: Any) -> Any:
    """What the declaration gives."""
    with torch.no_grad():
        return operation.reference(*sample)


def copied(sample: Any) -> Sample:
    """With tensors of their own, of the same strides where they have any."""
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in sample)


def tensors(values: Any) -> list[Tensor]:
    """All tensors in a nest."""
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _floats(values: Any) -> list[Tensor]:
    return [each for each in tensors(values) if each.is_floating_point()]


def described(operation: Operation, arguments: Any) -> tuple[str, int]:
    """Arguments as a person reads them, and how many elements they have."""

    def one(name: str, value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{name} {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return f"{name} {value}"

    text = ", ".join(one(*each) for each in zip(operation.signature.parameters, arguments, strict=True))
    return text, sum(each.numel() for each in tensors(arguments))
