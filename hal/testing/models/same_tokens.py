"""Whether a model's logits are those of a reference, up to rounding, and its choices too, up to ties.

The reference runs twice: in the dtype, and in a wider one on the same weights. How far apart the two are tells how far
rounding takes a logit, and a backend may be about as far from the wider one. :mod:`hal.compare.rounding` asks another
question, whether any two backends are apart by more than rounding and from which layer on, and disturbs a run for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import attrs
import torch
from torch import Tensor

from hal.checkpoint.loading import load_model
from hal.drivers.backend import active_backend
from hal.execution.runner import Runner
from hal.testing.models.random_checkpoint import checkpoint
from hal.testing.target import reference_backend

Texts = tuple[tuple[int, ...], ...]

TOKEN_RATIO = 4.0
"""How far a token's logits may be from the exact ones, root mean square, in units of the reference's distance there and
in the mean, added up: some tokens magnify what rounding does before them, and by chance the reference may come close
where a backend does not."""
TIE_RATIO = 6.0
"""How far apart two logits may be and still count as equal, in units of that distance there, or in the mean if that is
larger: each rounding moves both, so these are three standard deviations of what the gaps may differ by."""
BLOCK = 64


@attrs.frozen
class Truth:
    """What a reference makes of some texts.

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
    def of(cls, rounded: Sequence[Tensor], exact: Sequence[Tensor], dtype: torch.dtype) -> Truth:
        """Measure how far rounding to ``dtype`` takes logits: at the least what rounding the logits themselves does.

        Raises:
            AssertionError: not all of them are finite, and so they prove nothing.
        """
        floor, errors = torch.finfo(dtype).eps * math.sqrt(1 / 12), []
        for mine, right in zip(rounded, exact, strict=True):
            if not bool(mine.isfinite().all() & right.isfinite().all()):
                raise AssertionError("the reference's logits are not all finite, and prove nothing")
            wide = right.double()
            errors.append(_rms(torch.maximum((mine.double() - wide).abs(), wide.abs() * floor)))
        return cls(rounded, exact, errors, float(_rms(torch.cat(errors))))

    def error(self, row: int, at: int) -> float:
        """How far rounding takes the logits after a token: there, or in the mean if that is farther."""
        return max(self.mean, float(self.errors[row][at]))


@attrs.frozen
class Agreement:
    """A comparison that found nothing wrong.

    Attributes:
        tokens: after how many logits were compared, and the choice by them.
        mean: their distance from the exact ones, root mean square over all, in units of the reference's.
        worst: the largest of a token, in the units of :data:`TOKEN_RATIO`.
        ties: how many choices differ, between logits that are equal but for rounding.
    """

    tokens: int
    mean: float
    worst: float
    ties: int


@lru_cache(maxsize=64)
def truth(family: str, head_dim: int, dtype: torch.dtype, texts: Texts) -> Truth:
    """Run the declarations on ``texts``."""
    before = active_backend()
    try:
        rounded = _logits(family, head_dim, dtype, dtype, texts)
        wider = torch.float64 if dtype == torch.float32 else torch.float32
        exact = _logits(family, head_dim, torch.float32, wider, texts)
    finally:
        if before is not None:
            before.activate()
    return Truth.of(rounded, exact, dtype)


def _logits(family: str, head_dim: int, loaded: torch.dtype, computed: torch.dtype, texts: Texts) -> Sequence[Tensor]:
    needed = [math.ceil(len(text) / BLOCK) for text in texts]
    backend = reference_backend(loaded, sum(needed) * BLOCK, BLOCK)
    backend.activate()
    runner = Runner(load_model(checkpoint(family, head_dim), backend).to(computed), backend)
    free = iter(range(1, 1 + sum(needed)))
    blocks = [[next(free) for _ in range(count)] for count in needed]
    return [
        runner.step(runner.batch([text], [owned], all_logits=True)).logits.double()
        for text, owned in zip(texts, blocks, strict=True)
    ]


def check_logits(found: Mapping[tuple[int, int], Tensor], known: Truth, token_ratio: float = TOKEN_RATIO) -> Agreement:
    """Hold logits ``[vocab_size]``, by text and token, against a reference's.

    Raises:
        AssertionError: they are farther off than rounding explains, or choose another token where there is no tie.
    """
    distances, errors, worst, ties = [], [], 0.0, 0
    for (row, at), logits in found.items():
        where = f"sequence {row}, token {at}"
        if not bool(logits.isfinite().all()):
            raise AssertionError(f"{where}: not all logits are finite")
        distance, there = float(_rms(logits.double() - known.exact[row][at].double())), float(known.errors[row][at])
        ratio = distance / (there + known.mean)
        if ratio > token_ratio:
            raise AssertionError(
                f"{where}: logits are {distance:.3g} from the exact ones, the reference's {there:.3g} there and "
                f"{known.mean:.3g} in the mean"
            )
        ties += check_choice(where, int(logits.argmax()), known, row, at)
        distances.append(distance)
        errors.append(there)
        worst = max(worst, ratio)
    return Agreement(len(found), math.hypot(*distances) / math.hypot(*errors), worst, ties)


def check_choice(where: str, token: int, known: Truth, row: int, at: int) -> bool:
    """The choice of ``token`` is the reference's, or equal to it but for rounding; returns whether it is such a tie.

    Raises:
        AssertionError: it is neither.
    """
    rounded, exact = known.rounded[row][at].double(), known.exact[row][at].double()
    best = int(rounded.argmax())
    apart = max(float((each[best] - each[token]).abs()) for each in (rounded, exact))
    if token != best and apart > TIE_RATIO * known.error(row, at):
        raise AssertionError(
            f"{where}: token {token} in place of {best}, which are {apart:.3g} apart, with an error of "
            f"{known.error(row, at):.3g}"
        )
    return token != best


def _rms(values: Tensor) -> Tensor:
    """Root mean square over the last dimension."""
    return values.square().mean(-1).sqrt()
