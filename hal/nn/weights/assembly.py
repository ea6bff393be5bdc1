"""Assembly of a tensor from others, as data: the region that each source fills."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import attrs

from hal.errors import ModelError

Interval = tuple[int, int]
"""A start, and an exclusive end."""
Sizes = Mapping[str, Interval]
"""The interval of the assembled tensor that an assembly fills, by axis, in order."""


@attrs.frozen
class Region:
    """The region of the assembled tensor that one source fills.

    Attributes:
        target: the interval in the assembled tensor, by axis.
        axes: the source's axes, in order.
        shape: the shape of the whole source.
        starts: the start of the used part in the source, for each axis.
    """

    target: Mapping[str, Interval]
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    starts: tuple[int, ...]


class Assembly(ABC):
    """A way to assemble a tensor from sources."""

    @abstractmethod
    def regions(self, box: Sizes, inner: tuple[str, ...]) -> Iterator[Region]:
        """Yield the region of each source, in the order of sources.

        Args:
            box: the interval that this assembly fills, by axis of the assembled tensor.
            inner: the axes of its sources, which exclude stacked axes.

        Raises:
            ModelError: the assembly does not fit these sizes.
        """

    def cuts(self, axis: str, size: int) -> tuple[int, ...]:
        """Return the sizes of the parts along an axis, each of which the ranks split."""
        return (size,)


@attrs.frozen
class Whole(Assembly):
    """One source, unchanged."""

    def regions(self, box: Sizes, inner: tuple[str, ...]) -> Iterator[Region]:
        yield Region(box, inner, tuple(box[axis][1] - box[axis][0] for axis in inner), (0,) * len(inner))


@attrs.frozen
class Transposed(Assembly):
    """One source with its last two dimensions swapped."""

    def regions(self, box: Sizes, inner: tuple[str, ...]) -> Iterator[Region]:
        if len(inner) < 2:
            raise ModelError(
                f"a source has {len(inner)} dimensions, too few to transpose",
                "use Transposed for sources of 2 or more dimensions",
            )
        yield from Whole().regions(box, (*inner[:-2], inner[-1], inner[-2]))


@attrs.frozen
class MergedTransposed(Transposed):
    """One source with its last two dimensions swapped, in which parts are concatenated along an axis already.

    Attributes:
        axis: the axis.
        sizes: the sizes of the parts, each of which the ranks split.
    """

    axis: str
    sizes: tuple[int, ...]

    def cuts(self, axis: str, size: int) -> tuple[int, ...]:
        return self.sizes if axis == self.axis else (size,)


@attrs.frozen
class Slice(Assembly):
    """A part of one source along an axis, for checkpoint tensors that several tensors use.

    Attributes:
        axis: the axis of the assembled tensor.
        start: the start of the part in the source.
        of: the source's size along the axis.
        each: how the source is assembled: whole or transposed.
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
                f"a slice of {size} {self.axis} from {self.start} exceeds the source's {self.of}",
                "declare a slice within the source",
            )
        for region in self.each.regions(box, inner):
            place = region.axes.index(self.axis)
            shape, starts = list(region.shape), list(region.starts)
            shape[place], starts[place] = self.of, self.start
            yield attrs.evolve(region, shape=tuple(shape), starts=tuple(starts))


@attrs.frozen
class Concatenated(Assembly):
    """Parts concatenated along an axis.

    Attributes:
        axis: the axis.
        sizes: the sizes of the parts.
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
                f"parts of {', '.join(map(str, self.sizes))} {self.axis} do not add up to {stop - start}",
                "declare sizes whose sum is the size of the axis",
            )
        for size in self.sizes:
            yield from self.each.regions({**box, self.axis: (start, start + size)}, inner)
            start += size

    def cuts(self, axis: str, size: int) -> tuple[int, ...]:
        if axis != self.axis:
            return self.each.cuts(axis, size)
        return tuple(cut for part in self.sizes for cut in self.each.cuts(axis, part))


@attrs.frozen
class Merged(Whole):
    """One source, in which the parts are concatenated along an axis already. Ranks split each part.

    Attributes:
        axis: the axis.
        sizes: the sizes of the parts.
        order: the axes of the source, in its order; empty for those of the assembled tensor.
    """

    axis: str
    sizes: tuple[int, ...]
    order: tuple[str, ...] = ()

    def regions(self, box: Sizes, inner: tuple[str, ...]) -> Iterator[Region]:
        yield from super().regions(box, self.order or inner)

    def cuts(self, axis: str, size: int) -> tuple[int, ...]:
        return self.sizes if axis == self.axis else (size,)


@attrs.frozen
class Cut(Assembly):
    """Pieces of sources, concatenated along an axis in another order than the sources have them.

    Attributes:
        axis: the axis.
        sizes: the sizes of the parts, each of which ranks split. A part may have several pieces.
        pieces: for each source, the first element of its piece, the size of the piece, and the source's size along the
            axis. A source is named once for each of its pieces.
    """

    axis: str
    sizes: tuple[int, ...]
    pieces: tuple[tuple[int, int, int], ...]

    def regions(self, box: Sizes, inner: tuple[str, ...]) -> Iterator[Region]:
        _check_axis(self.axis, inner)
        start, stop = box[self.axis]
        if not sum(size for _, size, _ in self.pieces) == sum(self.sizes) == stop - start:
            raise ModelError(
                f"pieces of {sum(size for _, size, _ in self.pieces)} {self.axis}, in parts of {sum(self.sizes)}, do "
                f"not add up to {stop - start}",
                "declare pieces and parts whose sum is the size of the axis",
            )
        for first, size, of in self.pieces:
            yield from Slice(self.axis, first, of).regions({**box, self.axis: (start, start + size)}, inner)
            start += size

    def cuts(self, axis: str, size: int) -> tuple[int, ...]:
        return self.sizes if axis == self.axis else (size,)


@attrs.frozen
class Stacked(Assembly):
    """Parts stacked along a new first axis, which their sources do not have.

    Attributes:
        each: how each part is assembled.
    """

    each: Assembly = attrs.field(factory=Whole)

    def regions(self, box: Sizes, inner: tuple[str, ...]) -> Iterator[Region]:
        if not inner:
            raise ModelError("a tensor without dimensions cannot be stacked", "declare its first axis")
        for index in range(*box[inner[0]]):
            yield from self.each.regions({**box, inner[0]: (index, index + 1)}, inner[1:])

    def cuts(self, axis: str, size: int) -> tuple[int, ...]:
        return self.each.cuts(axis, size)


def _check_axis(axis: str, inner: tuple[str, ...]) -> None:
    if axis not in inner:
        raise ModelError(
            f"a weight is assembled along {axis!r}, but its sources have the axes {', '.join(inner) or '(none)'}",
            "use one of these axes",
        )
