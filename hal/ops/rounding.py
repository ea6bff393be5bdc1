"""How far rounding takes a run of a model, and whether a run, or a token that it chooses, is within that.

:mod:`hal.ops.tolerance` says why these are the measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor


@attrs.frozen
class Bounds:
    """How far a run's logits may be from the exact ones, in units of the measured rounding (:class:`ReferenceLogits`).

    Attributes:
        token: root mean square of one token's logits, in units of the rounding there and in the mean, added up: some
            tokens magnify what rounding does before them, and the reference may come close there by chance.
        mean: root mean square of all logits, in units of the mean rounding.
    """

    token: float
    mean: float = math.inf


SUITE = Bounds(token=4.0)
"""For the few tokens of a conformance case."""
MANY_TOKENS = Bounds(token=2.0, mean=1.05)
"""For thousands of tokens."""
TIE_RATIO = 6.0
"""Margin of a tie in units of the root mean square rounding there (:class:`ReferenceLogits`), or in the mean if that is
larger: each rounding moves both logits, so these are three standard deviations of what the margin may differ by."""
DRIFT_RATIO = 4.0
"""Drift of a correct run in units of the disturbed run's. Backends that compute the same were up to 1.3 times as far
apart on int8 weights, and 0.7 times otherwise."""
DRIFT_TIE_RATIO = 2.0
"""Margin of a tie in units of the disturbed run's drift, which is a maximum: each of two logits moves by as much."""
_DISTURBANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
# Parts of a result. Half precision is rounded once, from float32: a unit in the last place lies between two that were
# rounded from either side. In float32 sums of products differ by some units more.


def rms(values: Tensor) -> Tensor:
    """Return the root mean square over the last dimension, in float64."""
    return values.double().square().mean(-1).sqrt()


def drift(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference in a row of the last dimension, over the row's root mean square in ``expected``."""
    if found.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    wide, exact = found.double(), expected.double()
    same = (wide == exact) | (wide.isnan() & exact.isnan())
    difference = torch.where(same, 0.0, (wide - exact).abs()).amax(-1)
    share = torch.where(difference == 0, 0.0, difference / rms(exact))
    return float(share.nan_to_num(nan=math.inf, posinf=math.inf).max())


def margin(runs: Sequence[Tensor], one: int, other: int) -> float:
    """Return how far apart the logits of two tokens are, in the run where they are furthest; NaN counts as infinite."""
    return max(float((each[one].double() - each[other].double()).abs().nan_to_num(nan=math.inf)) for each in runs)


class Disturbance:
    """Moves results at random by about one rounding, reproducibly.

    Args:
        dtype: that the model computes in.
        seed: of the draws.
    """

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self._size = _DISTURBANCE[dtype]
        self._generator = torch.Generator().manual_seed(seed)

    def moved(self, result: Tensor) -> Tensor:
        """Return a result, moved. Integers stay: they follow from what is moved before them."""
        if not result.is_floating_point():
            return result
        wide = result.float()
        noise = torch.rand(result.shape, generator=self._generator).to(result.device) * 2 - 1
        return (wide + wide.abs() * (self._size * noise)).to(result.dtype)


@attrs.frozen
class ReferenceLogits:
    """What a reference makes of some texts, and how far rounding takes it.

    Attributes:
        rounded: per text, logits ``[tokens, vocab_size]`` after each token, in the dtype.
        exact: likewise, in a wider one.
        errors: per text, ``[tokens]``: root mean square of what is between them after each token.
        mean: the same over all tokens.
    """

    rounded: Sequence[Tensor]
    exact: Sequence[Tensor]
    errors: Sequence[Tensor]
    mean: float

    @classmethod
    def of(cls, rounded: Sequence[Tensor], exact: Sequence[Tensor], dtype: torch.dtype) -> ReferenceLogits:
        """Measure how far rounding to ``dtype`` takes logits: at the least what rounding the logits themselves does.

        Raises:
            AssertionError: not all of them are finite, and so they prove nothing.
        """
        floor, errors = torch.finfo(dtype).eps * math.sqrt(1 / 12), []
        for mine, right in zip(rounded, exact, strict=True):
            if not bool(mine.isfinite().all() & right.isfinite().all()):
                raise AssertionError("the reference's logits are not all finite, and prove nothing")
            wide = right.double()
            errors.append(rms(torch.maximum((mine.double() - wide).abs(), wide.abs() * floor)))
        return cls(rounded, exact, errors, float(rms(torch.cat(errors))))

    def error(self, row: int, at: int) -> float:
        """Return how far rounding takes the logits after a token: there, or in the mean if that is farther."""
        return max(self.mean, float(self.errors[row][at]))


@attrs.frozen
class Agreement:
    """A comparison that found nothing wrong.

    Attributes:
        tokens: after how many logits were compared, and the choice by them.
        mean: their distance from the exact ones, root mean square over all, in units of the reference's.
        worst: the largest of a token, in the units of :attr:`Bounds.token`.
        ties: how many choices differ, between logits that are equal but for rounding.
    """

    tokens: int
    mean: float
    worst: float
    ties: int


def check_logits(found: Mapping[tuple[int, int], Tensor], known: ReferenceLogits, bounds: Bounds = SUITE) -> Agreement:
    """Hold logits ``[vocab_size]``, by text and token, against a reference's.

    Raises:
        AssertionError: they are farther off than rounding explains, or choose another token where there is no tie.
    """
    distances, errors, worst, ties = [], [], 0.0, 0
    for (row, at), logits in found.items():
        where = f"sequence {row}, token {at}"
        if not bool(logits.isfinite().all()):
            raise AssertionError(f"{where}: not all logits are finite")
        distance, there = float(rms(logits.double() - known.exact[row][at].double())), float(known.errors[row][at])
        ratio = distance / (there + known.mean)
        if ratio > bounds.token:
            raise AssertionError(
                f"{where}: logits are {distance:.3g} from the exact ones, the reference's {there:.3g} there and "
                f"{known.mean:.3g} in the mean"
            )
        ties += check_choice(where, int(logits.argmax()), known, row, at)
        distances.append(distance)
        errors.append(there)
        worst = max(worst, ratio)
    agreement = Agreement(len(found), math.hypot(*distances) / math.hypot(*errors), worst, ties)
    if agreement.mean > bounds.mean:
        raise AssertionError(f"all logits are {agreement.mean:.4g} times as far from the exact ones as the reference's")
    return agreement


def check_choice(where: str, token: int, known: ReferenceLogits, row: int, at: int) -> bool:
    """Demand the reference's choice, or one that is equal but for rounding; return whether it is such a tie.

    Raises:
        AssertionError: it is neither.
    """
    runs = known.rounded[row][at], known.exact[row][at]
    best = int(runs[0].argmax())
    apart = margin(runs, best, token)
    if token != best and apart > TIE_RATIO * known.error(row, at):
        raise AssertionError(
            f"{where}: token {token} in place of {best}, which are {apart:.3g} apart, with an error of "
            f"{known.error(row, at):.3g}"
        )
    return token != best
