"""Whether the contenders compute the same: nothing is timed before that is known."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from hal.bench.bench_errors import BenchmarkError
from hal.bench.contenders.workload import Contender

TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1.5e-1}
"""Largest difference that is taken for rounding, by the dtype of the weights.

Rounding is 6e-2 in bfloat16 for 28 layers of random weights; attending to one of 512 cached tokens too few is 3e-1.
"""


@attrs.frozen
class Agreement:
    """What a contender's logits have to do with those of the first.

    Attributes:
        contender: its name.
        difference: the norm of the difference over the norm of the first's logits, of the worst sequence.
        tolerance: what was allowed.
        same_tokens: sequences with the same likeliest token.
        sequences: in all.
    """

    contender: str
    difference: float
    tolerance: float
    same_tokens: int
    sequences: int


def check(contenders: Sequence[Contender], dtype: torch.dtype) -> list[Agreement]:
    """Run a step of each and compare it with the first's.

    Raises:
        BenchmarkError: they differ by more than rounding does.
    """
    reference, *others = contenders
    expected = _logits(reference)
    return [_compare(reference.name, expected, each.name, _logits(each), TOLERANCE[dtype]) for each in others]


def _logits(contender: Contender) -> Tensor:
    contender.reset()
    return contender.step().float().cpu().clone()  # a replay's are valid until the next


def _compare(reference: str, expected: Tensor, name: str, found: Tensor, tolerance: float) -> Agreement:
    if found.shape != expected.shape:
        raise BenchmarkError(
            f"{name} gave logits {list(found.shape)}, and {reference} {list(expected.shape)}",
            "leave one of them out, and report it",
        )
    difference = float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    if not difference <= tolerance:  # also if it is NaN
        raise BenchmarkError(
            f"{name} and {reference} do not compute the same: their logits differ by {difference:.2g} of their norm, "
            f"where rounding explains {tolerance:.2g}; nothing was timed",
            "compare them in float32 (--dtype float32); if they still differ, one of them is wrong: report it",
        )
    same = int((found.argmax(-1) == expected.argmax(-1)).sum())
    return Agreement(name, difference, tolerance, same, len(expected))
