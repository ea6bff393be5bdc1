"""The check that all contenders compute the same logits, made before timing."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from hal.bench.bench_errors import BenchmarkError
from hal.bench.workload import Contender

TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1.5e-1}
"""Largest difference attributed to rounding, by the dtype of the weights.

Rounding is 6e-2 in bfloat16 for 28 layers of random weights; omitting one of 512 cached tokens gives 3e-1.
"""


@attrs.frozen
class Agreement:
    """The difference of a contender's logits from the first contender's.

    Attributes:
        contender: name.
        difference: largest norm of the difference of a sequence's logits, relative to the norm of the first's logits.
        tolerance: largest difference allowed.
        same_tokens: number of sequences with the same most likely token.
        sequences: number of sequences.
    """

    contender: str
    difference: float
    tolerance: float
    same_tokens: int
    sequences: int


def check(contenders: Sequence[Contender], dtype: torch.dtype) -> list[Agreement]:
    """Run a step of each comparable contender and compare its logits with the first one's.

    Raises:
        BenchmarkError: logits differ by more than rounding.
    """
    reference, *others = [each for each in contenders if each.comparable]
    expected = _logits(reference)
    return [_compare(reference.name, expected, each.name, _logits(each), TOLERANCE[dtype]) for each in others]


def _logits(contender: Contender) -> Tensor:
    contender.reset()
    return contender.logits(contender.step()).float().cpu().clone()  # a replay overwrites its logits


def _compare(reference: str, expected: Tensor, name: str, found: Tensor, tolerance: float) -> Agreement:
    if found.shape != expected.shape:
        raise BenchmarkError(
            f"{name} returned logits {list(found.shape)}, and {reference} {list(expected.shape)}",
            "exclude one of them, and report this",
        )
    difference = float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    if not difference <= tolerance:  # also if it is NaN
        raise BenchmarkError(
            f"{name} and {reference} do not compute the same: their logits differ by {difference:.2g} of their norm, "
            f"and the tolerance is {tolerance:.2g}; nothing was timed",
            "compare them in float32 (--dtype float32); if they still differ, one of them is wrong: report it",
        )
    same = int((found.argmax(-1) == expected.argmax(-1)).sum())
    return Agreement(name, difference, tolerance, same, len(expected))
