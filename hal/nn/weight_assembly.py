"""How one tensor is assembled of others, as data: which part of which source goes where."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import attrs

from hal.errors import ModelError

Interval = tuple[int, int]
"""A start, and an end that is not part of it."""
Sizes = Mapping[str, Interval]
"""By axis, in order: the interval of the assembled tensor that a part of the assembly fills."""


@attrs.frozen
class Region:
    """The part of the assembled tensor that one source fills.

    Attributes:
        target: by axis of the assembled tensor, the interval.
        axes: of the source, in its order.
        shape: of the whole source.
        starts: by axis of the source, where what is taken begins.
    """

    target: Mapping[str, Interval]
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    starts: tuple[int, ...]


class Assembly(ABC):
    """A way to make a tensor of sources."""

    @abstractmethod
    def regions(self, box: Sizes, inner: tuple[str, ...]) -> Iterator[Region]:
        """Yield what each source fills, in the order of sources.

        Args:
            box: by axis of the assembled tensor, the interval that this assembly fills.
            inner: the axes that its sources have; a stacked one is none of them.

        Raises:
            ModelError: the assembly does not fit these sizes.
        """

    def cuts(self, axis: str, size: int) -> tuple[int, ...]:
        """Return the sizes of the parts along an axis of which each rank gets its share."""
        return (size,)


@attrs.frozen
class Whole(Assembly):
    """One source, as it is."""

    def regions(self, box: Sizes, inner: tuple[str, ...]) -> Iterator[Region]:
        yield Region(box, inner, tuple(box[axis][1] - box[axis][0] for axis in inner), (0,) * len(inner))


@attrs.frozen
class Transposed(Assembly):
    """One source, whose last two dimensions are swapped."""

    def regions(self, box: Sizes, inner: tuple[str, ...]) -> Iterator[Region]:
        if len(inner) < 2:
            raise ModelError(
                f"a source of {len(inner)} dimensions is to be transposed", "transpose those of 2 or more only"
            )
        yield from Whole().regions(box, (*inner[:-2], inner[-1], inner[-2]))


@attrs.frozen
class Slice(Assembly):
    """A part of one source, along an axis: one tensor of the checkpoint feeds several.

    Attributes:
        axis: of the assembled tensor.
        start: where the part begins in the source.
        of: the source's size along the axis.
        each: whether the source is transposed.
    """

    axis: str
    start: int
    of: int
    each: Whole | Transposed = attrs.field(factory=Whole)

    def regions(self, box: Sizes, inner: tuple[str, ...]) -> Iterator[Region]:
        _check_axis(self.axis, inner)
        size = box[self.axis][1] - box[self.axis][0]
        if not 0 <= self.start <= self.start + size <= self.of:
            raise ModelError(
                f"a slice of {size} {self.axis} from {self.start} on is to be taken of {self.of}",
                "let it lie within the source",
            )
        for region in self.each.regions(box, inner):
            place = region.axes.index(self.axis)
            shape, starts = list(region.shape), list(region.starts)
            shape[place], starts[place] = self.of, self.start
            yield attrs.evolve(region, shape=tuple(shape), starts=tuple(starts))


@attrs.frozen
class Concatenated(Assembly):
    """Parts one after another along an axis.

    Attributes:
        axis: along which.
        sizes: of the parts.
        each: how each part is assembled.
    """

    axis: str
    sizes: tuple[int, ...]
    each: Assembly = attrs.field(factory=Whole)

    def regions(self, box: Sizes, inner: tuple[str, ...]) -> Iterator[Region]:
        _check_axis(self.axis, inner)
        start, stop = box[self.axis]
        if sum(self.sizes) != stop - start:
            raise ModelError(
                f"parts of {', '.join(map(str, self.sizes))} {self.axis} are to be concatenated to {stop - start}",
                "let the sizes add up",
            )
        for size in self.sizes:
            yield from self.each.regions({**box, self.axis: (start, start + size)}, inner)
            start += size

    def cuts(self, axis: str, size: int) -> tuple[int, ...]:
        if axis != self.axis:
            return self.each.cuts(axis, size)
        return tuple(cut for part in self.sizes for cut in self.each.cuts(axis, part))


@attrs.frozen
class Stacked(Assembly):
    """As many parts as the first axis is long; their sources do not have that axis.

    Attributes:
        each: how each part is assembled.
    """

    each: Assembly = attrs.field(factory=Whole)

    def regions(self, box: Sizes, inner: tuple[str, ...]) -> Iterator[Region]:
        if not inner:
            raise ModelError("a tensor without dimensions is to be stacked", "declare its first axis")
        for index in range(*box[inner[0]]):
            yield from self.each.regions({**box, inner[0]: (index, index + 1)}, inner[1:])

    def cuts(self, axis: str, size: int) -> tuple[int, ...]:
        return self.each.cuts(axis, size)


def _check_axis(axis: str, inner: tuple[str, ...]) -> None:
    if axis not in inner:
        raise ModelError(
            f"a weight is assembled along {axis!r}, and its sources have the axes {', '.join(inner) or 'of no name'}",
            "name one of these",
        )
