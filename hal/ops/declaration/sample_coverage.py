"""Whether samples tell the declared axes apart: two that are alike in all samples may hide that one was meant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations

from hal.ops.declaration.axes import LEADING
from hal.ops.declaration.constraints import Constraints
from hal.ops.declaration.samples import Sample


def lacking(constraints: Constraints, samples: Iterable[Sample]) -> Iterator[str]:
    """Say of which axes no sample shows that they are free, a sentence each.

    Args:
        constraints: that all samples meet.
        samples: all of an operation or a rewrite.
    """
    found = [constraints.sizes(sample) for sample in samples]
    ranks = {len(sizes[LEADING]) for sizes in found if LEADING in sizes}
    if len(ranks) == 1:
        yield f"{LEADING} stands for {ranks.pop()} axes in all samples"
    names = [name for name in constraints.axes if name != LEADING and any(name in sizes for sizes in found)]
    for name in names:
        known = {sizes[name] for sizes in found if name in sizes}
        if len(known) == 1:
            yield f"the axis {name} is {known.pop()} in all samples"
    for one, other in combinations(names, 2):
        both = [sizes for sizes in found if one in sizes and other in sizes]
        if both and all(sizes[one] == sizes[other] for sizes in both):
            yield f"the axes {one} and {other} are alike in all samples"
