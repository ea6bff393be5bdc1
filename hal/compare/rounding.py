"""What rounding does to a model: a run in which every operation's result is moved by about one rounding.

How far such a run comes from an undisturbed one depends on the model, its weights, the dtype and the text, so it is
measured, each time. What two correct implementations differ by is of that size.
:mod:`hal.testing.models.same_tokens` measures it on logits alone, by a second run in a wider dtype, which here the
reference may not have: it is any backend, on a device that computes in 16 bits perhaps, with weights that it prepared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hal.compare.comparison_results import Call
from hal.ops import Operation

ALLOWANCE = 4.0
"""How many times the disturbed run's drift is still taken for rounding. That run is one draw, of a distribution with a
long tail; backends that compute the same were up to 1.3 times as far apart on int8 weights, and 0.7 times otherwise."""
TIE = 2.0
"""The same for the distance of two tokens' logits: each of the two moves by as much as the disturbed run's most."""
DISTURBANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""How far a result is moved at most, in parts of it. Half precision is rounded once, from float32: a unit in the last
place lies between two that were rounded from either side. In float32 sums of products differ by some units more."""


class Disturbance:
    """Moves results at random, reproducibly.

    Args:
        dtype: that the model computes in.
        seed: of the draws.
    """

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self._size = DISTURBANCE[dtype]
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, call: Call, operation: Operation, kernel: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run the kernel, and return its results, moved. Integers stay: they follow from what is moved before them."""
        return tree_map_only(Tensor, self._moved, kernel(*args))

    def _moved(self, result: Tensor) -> Tensor:
        if not result.is_floating_point():
            return result
        wide = result.float()
        noise = torch.rand(result.shape, generator=self._generator).to(result.device) * 2 - 1
        return (wide + wide.abs() * (self._size * noise)).to(result.dtype)
