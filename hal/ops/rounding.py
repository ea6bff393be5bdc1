"""Measured rounding errors of model runs, and checks of runs and tokens against them.

:mod:`hal.ops.tolerance` explains the measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor


@attrs.frozen
class Bounds:
    """Maximum distance of a run's logits from exact ones, in units of the rounding error in :class:`ReferenceLogits`.

    Attributes:
        token: for the root mean square of one token's logits, relative to the sum of that token's rounding error and
            the mean: some tokens amplify earlier rounding, and the reference may be accurate there by chance.
        mean: for the root mean square of all logits, relative to the mean rounding error.
    """

    token: float
    mean: float = math.inf


SUITE = Bounds(token=4.0)
"""Bounds for the few tokens of a conformance case."""
MANY_TOKENS = Bounds(token=2.0, mean=1.05)
"""Bounds for thousands of tokens."""
TIE_RATIO = 6.0
"""Maximum margin of a tie, relative to the larger of the token's rounding error and the mean
(:class:`ReferenceLogits`). Rounding moves both logits, so this is three standard deviations of the margin."""
DRIFT_RATIO = 4.0
"""Maximum drift of a correct run, relative to the disturbed run's. Measured drift between correct backends was up to
1.3 times on int8 weights, and 0.7 times otherwise."""
DRIFT_TIE_RATIO = 2.0
"""Maximum margin of a tie, relative to the disturbed run's drift. That drift is a maximum, and moves both logits."""
_DISTURBANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
# Relative to the result. Half precision rounds once, from float32, so two correct results differ by at most one unit in
# the last place. Sums of products in float32 differ by several units.


def rms(values: Tensor) -> Tensor:
    """Return the root mean square over the last dimension, in float64."""
    return values.double().square().mean(-1).sqrt()


def drift(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the root mean square of its row in ``expected``."""
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
    """Return the largest distance of two tokens' logits in any run; NaN counts as infinite."""
    return max(float((each[one].double() - each[other].double()).abs().nan_to_num(nan=math.inf)) for each in runs)


class Disturbance:
    """Perturbs results at random by about one rounding, reproducibly.

    Args:
        dtype: the model's compute dtype.
        seed: the seed of the random generator.
    """

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self._size = _DISTURBANCE[dtype]
        self._generator = torch.Generator().manual_seed(seed)

    def moved(self, result: Tensor) -> Tensor:
        """Return a perturbed result. Integers stay unchanged, because they follow from perturbed values."""
        if not result.is_floating_point():
            return result
        wide = result.float()
        noise = torch.rand(result.shape, generator=self._generator).to(result.device) * 2 - 1
        return (wide + wide.abs() * (self._size * noise)).to(result.dtype)


@attrs.frozen
class ReferenceLogits:
    """The logits of a reference for some texts, and their rounding errors.

    Attributes:
        rounded: logits ``[tokens, vocab_size]`` of each text, in the compute dtype.
        exact: the same in a wider dtype.
        errors: ``[tokens]`` of each text: the root mean square of their difference, per token.
        mean: the root mean square over all tokens.
    """

    rounded: Sequence[Tensor]
    exact: Sequence[Tensor]
    errors: Sequence[Tensor]
    mean: float

    @classmethod
    def of(cls, rounded: Sequence[Tensor], exact: Sequence[Tensor], dtype: torch.dtype) -> ReferenceLogits:
        """Measure the rounding errors of logits; each is at least that of rounding the logits themselves to ``dtype``.

        Raises:
            AssertionError: a logit is not finite.
        """
        floor, errors = torch.finfo(dtype).eps * math.sqrt(1 / 12), []
        for mine, right in zip(rounded, exact, strict=True):
            if not bool(mine.isfinite().all() & right.isfinite().all()):
                raise AssertionError("the reference has logits that are not finite, so it cannot be compared with")
            wide = right.double()
            errors.append(rms(torch.maximum((mine.double() - wide).abs(), wide.abs() * floor)))
        return cls(rounded, exact, errors, float(rms(torch.cat(errors))))

    def error(self, row: int, at: int) -> float:
        """Return the rounding error of a token's logits, or the mean if that is larger."""
        return max(self.mean, float(self.errors[row][at]))


@attrs.frozen
class Agreement:
    """The result of a successful comparison.

    Attributes:
        tokens: the number of compared tokens.
        mean: the distance from the exact logits, as the root mean square over all, relative to the reference's.
        worst: the largest distance of a token, in units of :attr:`Bounds.token`.
        ties: the number of chosen tokens that differ within rounding.
    """

    tokens: int
    mean: float
    worst: float
    ties: int


def check_logits(found: Mapping[tuple[int, int], Tensor], known: ReferenceLogits, bounds: Bounds = SUITE) -> Agreement:
    """Compare logits ``[vocab_size]``, by text and token, with a reference.

    Raises:
        AssertionError: the logits are farther from the exact ones than rounding explains, or choose another token that
            is not tied.
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
                f"{where}: logits are {distance:.3g} from the exact ones; the reference's are {there:.3g} from them "
                f"at this token and {known.mean:.3g} in the mean"
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
    """Check that a token is the reference's choice, or tied with it. Return whether it is a tie.

    Raises:
        AssertionError: it is neither.
    """
    runs = known.rounded[row][at], known.exact[row][at]
    best = int(runs[0].argmax())
    apart = margin(runs, best, token)
    if token != best and apart > TIE_RATIO * known.error(row, at):
        raise AssertionError(
            f"{where}: chose token {token} instead of {best}; their logits differ by {apart:.3g}, with a rounding "
            f"error of {known.error(row, at):.3g}"
        )
    return token != best
