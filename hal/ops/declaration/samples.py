"""Sample inputs of operations, for tests, and whether they distinguish the declared axes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from hal.ops.declaration.axes import LEADING
from hal.ops.declaration.constraints import Constraints

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
