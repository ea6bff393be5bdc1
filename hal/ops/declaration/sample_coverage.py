"""Coverage of samples: whether they distinguish the declared axes, to detect a wrong axis in a declaration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations

from hal.ops.declaration.axes import LEADING
from hal.ops.declaration.constraints import Constraints
from hal.ops.declaration.samples import Sample


def uncovered_axes(constraints: Constraints, samples: Iterable[Sample]) -> Iterator[str]:
    """Yield a sentence for each axis that no sample proves to be free.

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
