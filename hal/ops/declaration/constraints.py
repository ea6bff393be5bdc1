"""Constraints on the tensors of a call: the axes and dtypes that an operation or a rewrite declares, with samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from hal.ops.declaration.axes import LEADING, Axis, Shape, may_be_size, same_size, same_sizes
from hal.ops.declaration.dtypes import FLOATING, Dtypes, format_dtypes

Result: TypeAlias = tuple[tuple[Any, ...], torch.dtype]
"""The shape, perhaps with symbolic sizes, and the dtype of a result."""


@attrs.frozen
class Constraints:
    """The axes and dtypes of arguments and results.

    Attributes:
        arguments: the names of all arguments, in order.
        shapes: the shapes of tensor arguments, by name.
        dtypes: the dtypes of tensor arguments, by name.
        results: the shapes of the results.
        result_dtypes: the dtypes of the results.
    """

    arguments: tuple[str, ...]
    shapes: tuple[tuple[str, Shape], ...]
    dtypes: tuple[tuple[str, Dtypes], ...]
    results: tuple[Shape, ...]
    result_dtypes: tuple[Dtypes, ...]

    def shape(self, argument: str) -> Shape | None:
        """Return the declared shape of an argument, or None if it is not a tensor."""
        return dict(self.shapes).get(argument)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of all axes of arguments and results, including ``...``."""
        every = (*(shape for _, shape in self.shapes), *self.results)
        return tuple(dict.fromkeys(name for shape in every for name in shape.names))

    def unmet(self, arguments: Sequence[Any]) -> str | None:
        """Return a constraint that a call's arguments violate, or None.

        Args:
            arguments: all arguments, in order. Tensors may be fake, with symbolic sizes; no guards are added.
        """
        given = self._by_name(arguments)
        return self._unlike_dtype(given) or _Sizes(given).unlike(self._tensors(given))

    def unmet_results(self, arguments: Sequence[Any], results: Sequence[Any]) -> str | None:
        """Return a constraint that a call's results violate, or None."""
        given = self._by_name(arguments)
        if len(results) != len(self.results):
            return f"the call has {len(results)} results, but {len(self.results)} are declared"
        for place, (result, allowed) in enumerate(zip(results, self.result_dtypes, strict=True)):
            wanted = self._dtype(allowed, given) if len(allowed) > 1 else None
            known = allowed if wanted is None else (wanted,)
            if (reason := _unlike(f"result {place}", result.dtype, known, given, self._step(given))) is not None:
                return reason
        named = [
            (f"result {place}", shape, tuple(result.shape))
            for place, (shape, result) in enumerate(zip(self.results, results, strict=True))
        ]
        return _Sizes(given).unlike([*self._tensors(given), *named])

    def derived_results(self, arguments: Sequence[Any]) -> list[Result] | None:
        """Return the shapes and dtypes that the results of a call have by declaration.

        None if the declaration leaves one open, or the arguments violate it.
        """
        if self.unmet(arguments) is not None:
            return None
        given = self._by_name(arguments)
        found = _Sizes(given)
        found.unlike(self._tensors(given))
        shapes = [found.shape(each) for each in self.results]
        dtypes = [self._dtype(each, given) for each in self.result_dtypes]
        known = [(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True) if shape is not None and dtype]
        return known if len(known) == len(shapes) else None

    def sizes(self, arguments: Sequence[Any]) -> dict[str, Any]:
        """Return the size of every named axis in a valid call's arguments; for ``...``, the shape."""
        given = self._by_name(arguments)
        found = _Sizes(given)
        found.unlike(self._tensors(given))
        leading = {} if found.leading is None else {LEADING: tuple(found.leading[1])}
        return {**{name: size for name, size in found.known.items() if name in self.axes}, **leading}

    def _by_name(self, arguments: Sequence[Any]) -> dict[str, Any]:
        """Return the arguments by name. Omitted ones have defaults, which are not tensors, so they map to None."""
        return {**dict.fromkeys(self.arguments), **dict(zip(self.arguments, arguments, strict=False))}

    def _tensors(self, given: Mapping[str, Any]) -> list[_Found]:
        return [
            (name, shape, tuple(given[name].shape)) for name, shape in self.shapes if isinstance(given[name], Tensor)
        ]

    def _step(self, given: Mapping[str, Any]) -> tuple[str, torch.dtype] | None:
        """Return the name and dtype of the first argument that is declared FLOATING, or None."""
        for name, allowed in self.dtypes:
            if allowed == (FLOATING,) and isinstance(given[name], Tensor):
                return name, given[name].dtype
        return None

    def _dtype(self, allowed: Dtypes, given: Mapping[str, Any]) -> torch.dtype | None:
        """Return the dtype that a result has in a call: the first that the call gives; None if it gives none."""
        for each in allowed:
            if each is FLOATING:
                step = self._step(given)
                return None if step is None else step[1]
            found = given[each] if isinstance(each, str) else each
            found = found.dtype if isinstance(found, Tensor) else found
            if isinstance(found, torch.dtype):
                return found
        return None

    def _unlike_dtype(self, given: Mapping[str, Any]) -> str | None:
        step = self._step(given)
        for name, allowed in self.dtypes:
            if isinstance(given[name], Tensor):
                reason = _unlike(name, given[name].dtype, allowed, given, step)
                if reason is not None:
                    return reason
        return None


def _unlike(
    name: str, dtype: torch.dtype, allowed: Dtypes, given: Mapping[str, Any], step: tuple[str, torch.dtype] | None
) -> str | None:
    """Return why a tensor's dtype is not allowed, or None if it is."""
    known: dict[torch.dtype, str] = {}
    for each in allowed:
        if each is FLOATING:
            if not dtype.is_floating_point and len(allowed) == 1:
                return f"{name} is {format_dtypes([dtype])}, but declared floating"
            if step is None:
                return None
            known[step[1]] = step[0]
        elif isinstance(each, str):
            other = given[each]
            if other is None:
                return None
            known[other.dtype if isinstance(other, Tensor) else other] = each
        else:
            known[each] = ""
    if dtype in known:
        return None
    if len(known) == 1 and "" not in known.values():
        ((wanted, other),) = known.items()
        return (
            f"{other} is {format_dtypes([wanted])} and {name} is {format_dtypes([dtype])}, but they are declared alike"
        )
    return f"{name} is {format_dtypes([dtype])}, but declared {format_dtypes(known)}"


_Found: TypeAlias = tuple[str, Shape, tuple[Any, ...]]
"""A tensor's name, declared shape, and sizes."""


class _Sizes:
    """The sizes of a call's axes, collected from its tensors."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.known: dict[str, Any] = {name: value for name, value in given.items() if type(value) is int}
        self.leading: tuple[str, Sequence[Any]] | None = None
        self._source = {name: name for name in self.known}

    def unlike(self, tensors: Sequence[_Found]) -> str | None:
        """Return why a tensor does not have its declared shape, or None."""
        for name, shape, sizes in tensors:
            if not shape.has_rank(len(sizes)):
                return f"{_declared(name, shape, sizes)}: its rank is {len(sizes)}"
        for named in (True, False):  # named axes first, because computed sizes use them
            for name, shape, sizes in tensors:
                reason = self._named(name, shape, sizes) if named else self._computed(shape, sizes)
                if reason is not None:
                    return f"{_declared(name, shape, sizes)}, {reason}"
        return None

    def shape(self, declared: Shape) -> tuple[Any, ...] | None:
        """Return the sizes of a declared shape, or None if one of them is open."""
        if declared.leading is not None and self.leading is None:
            return None
        sizes = [*(self.leading[1] if declared.leading is not None and self.leading is not None else ())]
        for axis in declared.axes:
            if axis.name in self.known:
                sizes.append(self.known[axis.name])
            elif len(axis.sizes) == 1 and self.known.keys() >= set(axis.sizes[0].names):
                sizes.append(axis.sizes[0].value(self.known))
            else:
                return None
        return tuple(sizes)

    def _named(self, name: str, shape: Shape, found: tuple[Any, ...]) -> str | None:
        front = found[: len(found) - len(shape.axes)]
        if shape.leading is not None:
            if self.leading is None:
                self.leading = name, front
            elif not same_sizes(front, self.leading[1]):
                return f"where {LEADING} is {format_shape(self.leading[1])} in {self.leading[0]}"
        for axis, size in _own(shape, found):
            if axis.name is None:
                continue
            if axis.name not in self.known:
                self.known[axis.name], self._source[axis.name] = size, name
            elif not same_size(size, self.known[axis.name]):
                source = self._source[axis.name]
                where = "" if source == axis.name else f" in {source}"
                return f"where {axis.name} is {self.known[axis.name]}{where}"
        return None

    def _computed(self, shape: Shape, found: tuple[Any, ...]) -> str | None:
        for axis, size in _own(shape, found):
            # Sizes with the name of an omitted argument are unknown.
            sizes = [each for each in axis.sizes if self.known.keys() >= set(each.names)]
            if len(sizes) < len(axis.sizes) or not sizes:
                continue
            values = [(each.computed, each.value(self.known)) for each in sizes]
            if not any((may_be_size if computed else same_size)(size, value) for computed, value in values):
                return f"where {axis.text} is {' or '.join(str(value) for _, value in values)}"
        return None


def _own(shape: Shape, sizes: tuple[Any, ...]) -> Iterator[tuple[Axis, Any]]:
    return zip(shape.axes, sizes[len(sizes) - len(shape.axes) :], strict=True)


def _declared(name: str, shape: Shape, sizes: tuple[Any, ...]) -> str:
    return f"{name} is {format_shape(sizes)}, but declared `{shape.text}`"


def format_shape(shape: Iterable[Any]) -> str:
    """Return a shape as text, such as ``[2, 3]``."""
    return f"[{', '.join(map(str, shape))}]"


Sample = tuple[Any, ...]
"""The positional arguments of one call."""


class Draw:
    """A seeded source of tensors of one dtype on one device.

    Values are drawn on the CPU and then moved, so that they are the same on every device.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self.seed = seed
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return normally distributed values of the draw's dtype."""
        values = torch.randn(shape, generator=self._generator) * scale
        return values.to(self.dtype).to(self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return uniform integers from ``low`` to ``high - 1``."""
        return torch.randint(low, high, shape, generator=self._generator).to(dtype).to(self.device)

    def permutation(self, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return the numbers less than ``count`` in random order."""
        return torch.randperm(count, generator=self._generator).to(dtype).to(self.device)

    def tensor(self, values: Any, dtype: torch.dtype) -> Tensor:
        """Return the given values on the draw's device."""
        return torch.tensor(values, dtype=dtype, device=self.device)


def uncovered_axes(constraints: Constraints, samples: Iterable[Sample]) -> Iterator[str]:
    """Yield a sentence for each axis that no sample proves to be free, to detect a wrong axis in a declaration.

    Args:
        constraints: the constraints, which all samples meet.
        samples: all samples of an operation or a rewrite.
    """
    found = [constraints.sizes(sample) for sample in samples]
    ranks = {len(sizes[LEADING]) for sizes in found if LEADING in sizes}
    if len(ranks) == 1:
        yield f"{LEADING} represents {ranks.pop()} axes in all samples"
    names = [name for name in constraints.axes if name != LEADING and any(name in sizes for sizes in found)]
    for name in names:
        known = {sizes[name] for sizes in found if name in sizes}
        if len(known) == 1:
            yield f"the axis {name} is {known.pop()} in all samples"
    for one, other in combinations(names, 2):
        both = [sizes for sizes in found if one in sizes and other in sizes]
        if both and all(sizes[one] == sizes[other] for sizes in both):
            yield f"the axes {one} and {other} are equal in all samples"
