"""How ranks share an axis of a tensor, such as the heads of a projection or the rows of a vocabulary."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from hal.errors import ConfigError

MOST_RANKS = 64
"""The largest number of ranks that an error suggests."""

TENSOR = "parallel.tensor"
"""The key of errors about the number of ranks that split each layer."""


def unshared(problem: str, what: str, counts: Iterable[int]) -> ConfigError:
    """Return the error for a number of ranks, whose remedy lists ``counts``: ``what`` says which they are."""
    numbers = ", ".join(map(str, counts))
    return ConfigError(problem, f"set --tensor-parallel, or {TENSOR}, to {what}: {numbers}", key=TENSOR)


@attrs.frozen
class Share:
    """How ranks share an axis. By default they get equal parts.

    Attributes:
        unit: the number of consecutive elements that stay together, such as those of a head.
        repeat: whether several ranks may hold the same unit, where there are more ranks than units.
        pad: whether the parts are rounded up; the last ranks then have fewer elements, followed by zeros.
    """

    unit: int = 1
    repeat: bool = False
    pad: bool = False

    def size(self, total: int, ranks: int) -> int:
        """Return the number of elements of each rank, padding included.

        Args:
            total: the number of elements of all ranks, a multiple of ``unit``.
            ranks: the number of ranks.

        Raises:
            ConfigError: the ranks cannot share the axis.
        """
        units = total // self.unit
        if units % ranks == 0:
            return total // ranks
        if self.repeat and ranks % units == 0:
            return self.unit
        if self.pad:
            return -(-units // ranks) * self.unit
        what = f"{total} elements" if self.unit == 1 else f"{units} heads of {self.unit} elements"
        raise unshared(
            f"{ranks} ranks cannot share {what} equally",
            f"a divisor of {units}",
            (each for each in range(1, min(units, MOST_RANKS) + 1) if units % each == 0),
        )

    def interval(self, total: int, rank: int, ranks: int) -> tuple[int, int]:
        """Return the first element of a rank, and the end of its elements, without padding.

        Raises:
            ConfigError: the ranks cannot share the axis.
        """
        size, units = self.size(total, ranks), total // self.unit
        repeated = units < ranks and self.repeat
        start = rank * units // ranks * self.unit if repeated else min(rank * size, total)
        return start, min(start + size, total)


EQUALLY = Share()
PADDED = Share(pad=True)
