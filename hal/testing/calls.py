"""Calls of an operation to be examined: its samples, and what is derived from them without a word from its author."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hal import ops
from hal.ops.declaration import Operation
from hal.ops.samples import Draw, Sample

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
    found = rows_of(operation)
    if found is None or operation.host:  # whose lengths would no longer be those of the rows
        return
    number, places = found
    for count in (1, 0):
        yield Call(operation, dtype, number, f"rows-{count}", partial(first_rows, places, count))
    yield Call(operation, dtype, number, "large", partial(scaled, operation, places, 4096.0))


def special_calls_of(operation: Operation, dtype: torch.dtype) -> Iterator[Call]:
    """Where results are floating, one row with NaN, and one with an infinity."""
    found = rows_of(operation)
    if found is None:
        return
    number, places = found
    sample = nth_sample(operation, Draw(), number)
    if any(sample[place].is_floating_point() for place in places) and _floats(reference(operation, sample)):
        for name, value in (("nan", float("nan")), ("infinity", float("inf"))):
            yield Call(operation, dtype, number, name, partial(with_special, places, value))


@lru_cache(maxsize=512)
def widest(operation: Operation) -> int:
    """The number of the sample with the most elements."""
    sizes = [sum(each.numel() for each in tensors(sample)) for sample in operation.samples(Draw())]
    return max(range(len(sizes)), key=sizes.__getitem__)


@lru_cache(maxsize=512)
def rows_of(operation: Operation) -> tuple[int, tuple[int, ...]] | None:
    """A sample with several rows, and which of its arguments hold them; None if the operation has no such.

    Rows are found by trying: arguments of one leading size are cut to fewer rows, and if the reference then gives the
    same rows as before, it computes row by row.
    """
    for number, sample in enumerate(operation.samples(Draw())):
        places = _of_leading_size(operation, sample)
        if places and _is_by_rows(operation, sample, places):
            return number, places
    return None


def _of_leading_size(operation: Operation, sample: Sample) -> tuple[int, ...]:
    names = list(operation.signature.parameters)
    free = [
        place for place, value in enumerate(sample)
        if isinstance(value, Tensor) and value.dim() and names[place] not in (*state_names(), *operation.host)
    ]  # fmt: skip
    if not free or sample[free[0]].shape[0] < 2:
        return ()
    rows = sample[free[0]].shape[0]
    return tuple(place for place in free if sample[place].shape[0] == rows)


def _is_by_rows(operation: Operation, sample: Sample, places: tuple[int, ...]) -> bool:
    whole = tree_leaves(reference(operation, copied(sample)))
    rows = sample[places[0]].shape[0]
    try:
        part = tree_leaves(reference(operation, first_rows(places, 1, copied(sample))))
    except (RuntimeError, IndexError, ValueError):
        return False
    pairs = [(one, all_) for one, all_ in zip(part, whole, strict=True) if isinstance(one, Tensor)]
    return all(
        all_.dim() and all_.shape[0] == rows and one.shape == all_[:1].shape and torch.allclose(one, all_[:1], 1e-4)
        for one, all_ in pairs
    )


@lru_cache(maxsize=1)
def state_names() -> frozenset[str]:
    """Names of arguments that some operation writes: such as caches, whose layout is not the caller's to choose."""
    return frozenset(name for each in ops.catalogue().values() for name in each.mutates)


def first_rows(places: tuple[int, ...], count: int, sample: Sample) -> Sample:
    """The arguments at ``places`` cut to their first rows."""
    return tuple(value[:count] if place in places else value for place, value in enumerate(sample))


def rows_apart(operation: Operation, sample: Sample) -> Sample:
    """Every floating argument of two dimensions or more as a slice of a wider tensor, as of a merged projection."""

    def apart(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2 or not value.is_floating_point():
            return value
        if name in state_names() or name in operation.host or name == "weight":
            return value
        width = value.shape[-1]
        wide = value.new_full((*value.shape[:-1], 3 * width), float("nan"))
        wide[..., width : 2 * width] = value
        return wide[..., width : 2 * width]

    return tuple(apart(name, value) for name, value in zip(operation.signature.parameters, sample, strict=True))


def scaled(operation: Operation, places: tuple[int, ...], factor: float, sample: Sample) -> Sample:
    """The first floating argument with rows times the largest power of two that leaves finite results."""
    place = next((each for each in places if sample[each].is_floating_point()), None)
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


def with_special(places: tuple[int, ...], special: float, sample: Sample) -> Sample:
    """The first row of the first floating argument with rows begins with ``special``."""
    place = next(each for each in places if sample[each].is_floating_point())
    changed = sample[place].clone()
    changed[0].view(-1)[0] = special
    return tuple(changed if at == place else value for at, value in enumerate(sample))


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
