"""The calls with which an operation is tested: its samples, and variants derived from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hal.ops.declaration.axes import LEADING, STEP_AXES, Shape
from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.operation import Operation
from hal.ops.forms import FLOAT

Transform = Callable[[Sample], Sample]


@attrs.frozen
class Call:
    """One call: a sample of an operation, optionally transformed.

    Attributes:
        dtype: dtype in which the sample is drawn.
        variant: name of the call, unique per operation and dtype.
        transform: changes the sample's arguments.
    """

    operation: Operation
    dtype: torch.dtype
    number: int
    variant: str
    transform: Transform = attrs.field(default=lambda sample: sample)

    def arguments(self, device: torch.device | str, seed: int = 0) -> list[Any]:
        """Return the arguments on ``device``; host arguments are on the CPU and share no memory with the others."""
        drawn = self.transform(nth_sample(self.operation, self.number, self.dtype, device, seed))
        names = zip(self.operation.signature.parameters, drawn, strict=True)
        return [value.cpu().clone() if name in self.operation.host else value for name, value in names]


def nth_sample(
    operation: Operation,
    number: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Sample:
    """Return the operation's sample with index ``number``; see :class:`hal.ops.Draw`. The caller may write to it."""
    drawn, further = _samples(operation, dtype, device, seed)
    drawn.extend(islice(further, max(0, number + 1 - len(drawn))))
    return tuple(_copied(value) if isinstance(value, Tensor) else value for value in drawn[number])


@lru_cache(maxsize=8)
def _samples(
    operation: Operation, dtype: torch.dtype, device: torch.device | str, seed: int
) -> tuple[list[Sample], Iterator[Sample]]:
    """Return the samples that have been drawn, of which cases ask in order, and the iterator of the rest."""
    return [], iter(operation.samples(Draw(dtype, device, seed)))


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy of the same strides, also of a slice."""
    copied = tensor.clone()
    if copied.stride() == tensor.stride():
        return copied
    storage = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0).clone()
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@lru_cache(maxsize=512)
def sample_count(operation: Operation) -> int:
    """Return the number of samples that an operation declares."""
    return sum(1 for _ in operation.samples(Draw()))


def calls_of(operation: Operation, dtype: torch.dtype) -> Iterator[Call]:
    """Yield a call per sample, and the variants: strided rows, one row, no rows, large values."""
    for number in range(sample_count(operation)):
        yield Call(operation, dtype, number, f"sample-{number}")
    yield Call(operation, dtype, largest_sample(operation), "rows-apart", partial(rows_apart, operation))
    if operation.host:  # host lengths would not match the changed number of rows
        return
    for form, several in with_rows(operation).items():
        for count in (1, 0):
            yield Call(operation, dtype, several, f"{form}rows-{count}", partial(first_rows, operation, count))
        yield Call(operation, dtype, several, f"{form}large", partial(scaled, operation, 4096.0))


def special_calls_of(operation: Operation, dtype: torch.dtype) -> Iterator[Call]:
    """Yield a call with NaN and a call with infinity in one row, if the operation has floating-point results."""
    for form, number in with_rows(operation).items():
        sample = nth_sample(operation, number)
        if first_floating(operation, sample) is not None and _floats(reference(operation, clone_tensors(sample))):
            for name, value in (("nan", float("nan")), ("infinity", float("inf"))):
                yield Call(operation, dtype, number, f"{form}{name}", partial(with_special, operation, value))


@lru_cache(maxsize=512)
def largest_sample(operation: Operation) -> int:
    """Return the index of the sample with the most elements."""
    sizes = [sum(each.numel() for each in tensors(sample)) for sample in operation.samples(Draw())]
    return max(range(len(sizes)), key=sizes.__getitem__)


@lru_cache(maxsize=512)
def with_rows(operation: Operation) -> Mapping[str, int]:
    """Return the index of the first sample with several rows, of each form of weights, by what names of calls add.

    Empty if the operation is not row-wise.
    """
    found: dict[str, int] = {}
    for number, sample in enumerate(operation.samples(Draw())):
        form = f"{sample[-1]}, " if operation.takes_forms and sample[-1] != FLOAT else ""
        places = row_dims(operation, sample)
        if any(sample[place].shape[dim] > 1 for place, dim in places.items()):
            found.setdefault(form, number)
    return MappingProxyType(found)


def row_dims(operation: Operation, sample: Sample) -> dict[int, int]:
    """Return the row dimension of each argument that has one, by argument position."""
    found = {}
    for place, (name, value) in enumerate(zip(operation.constraints.arguments, sample, strict=True)):
        dim = _row_dim(operation, operation.constraints.shape(name), value)
        if dim is not None:
            found[place] = dim
    return found


def result_row_dims(operation: Operation, results: Sequence[Tensor]) -> list[int | None]:
    """Return the row dimension of each result, or None for a result without one."""
    return [_row_dim(operation, *each) for each in zip(operation.constraints.results, results, strict=True)]


def _row_dim(operation: Operation, shape: Shape | None, value: Any) -> int | None:
    if operation.rowwise is None or shape is None or not isinstance(value, Tensor):
        return None
    return shape.dim(operation.rowwise, value.dim())


def first_rows(operation: Operation, count: int, sample: Sample) -> Sample:
    """Return the sample with each argument that has rows cut to its first ``count``."""
    dims = row_dims(operation, sample)
    return tuple(value.narrow(dims[place], 0, count) if place in dims else value for place, value in enumerate(sample))


def rows_apart(operation: Operation, sample: Sample) -> Sample:
    """Return the sample with floating-point arguments of two or more dimensions as slices of a wider tensor.

    Outputs of a merged projection have this layout. Weights and states are unchanged: the backend sets their layout.
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
    """Return whether the axes of ``shape`` mark a tensor that every step creates anew."""
    return not {*STEP_AXES, LEADING, operation.rowwise}.isdisjoint(shape.names)


def scaled(operation: Operation, factor: float, sample: Sample) -> Sample:
    """Multiply the first floating-point argument with rows by the largest power of two that keeps results finite."""
    place = first_floating(operation, sample)
    if place is None:
        return sample
    on_cpu = tuple(value.cpu() if isinstance(value, Tensor) else value for value in sample)
    while factor > 1:
        given = list(clone_tensors(on_cpu))
        given[place] = given[place] * factor
        finite = [given[place], *_floats(reference(operation, given))]
        if all(bool(each.isfinite().all()) for each in finite):
            break
        factor /= 2
    return tuple(value * factor if at == place else value for at, value in enumerate(sample))


def with_special(operation: Operation, special: float, sample: Sample) -> Sample:
    """Set the first element of the first floating-point argument with rows to ``special``."""
    place = first_floating(operation, sample)
    if place is None:
        return sample
    changed = sample[place].clone()
    row = changed.select(row_dims(operation, sample)[place], 0)
    row[(0,) * row.dim()] = special
    return tuple(changed if at == place else value for at, value in enumerate(sample))


def first_floating(operation: Operation, sample: Sample) -> int | None:
    """Return the position of the first floating-point argument that has rows, or None."""
    return next((place for place in row_dims(operation, sample) if sample[place].is_floating_point()), None)


def reference(operation: Operation, sample: Any) -> Any:
    """Return the results of the operation's body."""
    with torch.no_grad():
        return operation.reference(*sample)


def clone_tensors(sample: Any) -> Sample:
    """Return the sample with its tensors cloned; strides are preserved."""
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in sample)


def tensors(values: Any) -> list[Tensor]:
    """Return all tensors in a nested structure."""
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _floats(values: Any) -> list[Tensor]:
    return [each for each in tensors(values) if each.is_floating_point()]


def describe(operation: Operation, arguments: Any) -> tuple[str, int]:
    """Return a readable description of the arguments, and their number of elements."""

    def one(name: str, value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{name} {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return f"{name} {value}"

    text = ", ".join(one(*each) for each in zip(operation.signature.parameters, arguments, strict=True))
    return text, sum(each.numel() for each in tensors(arguments))
