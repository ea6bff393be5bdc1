"""Whether a model's logits are those of the declarations, up to rounding, and its choices too, up to ties.

The declarations run on the CPU twice: in the dtype, and in a wider one on the same weights. How far apart the two are
tells how far rounding takes a logit, and the backend may be about as far from the wider one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import attrs
import torch
from torch import Tensor

from hal.backend import active_backend
from hal.runtime.loading import load_model
from hal.runtime.runner import Runner
from hal.testing.checkpoints import checkpoint
from hal.testing.target import reference_backend

Texts = tuple[tuple[int, ...], ...]

TOKEN_RATIO = 4.0
"""How far a token's logits may be from the wider dtype's, root mean square, in units of the reference's distance there
and in the mean, added up."""
TIE_RATIO = 6.0
"""How far apart two logits may be and still count as equal, in units of that distance."""
BLOCK = 64


@attrs.frozen
class Truth:
    """What the declarations make of some texts.

    Attributes:
        rounded: per text, logits ``[tokens, vocab_size]`` after each token, in the dtype.
        exact: likewise, in a wider one.
        mean: root mean square of what is between them, over all.
    """

    rounded: Sequence[Tensor]
    exact: Sequence[Tensor]
    mean: float

    def error(self, row: int, at: int) -> float:
        """How far rounding takes the logits after a token: there, or in the mean if that is farther."""
        return max(self.mean, _rms(self.rounded[row][at] - self.exact[row][at]))


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
    floor = torch.finfo(dtype).eps * math.sqrt(1 / 12)
    gaps = torch.cat([torch.maximum((a - b).abs(), b.abs() * floor) for a, b in zip(rounded, exact, strict=True)])
    return Truth(rounded, exact, _rms(gaps))


def _logits(family: str, head_dim: int, loaded: torch.dtype, computed: torch.dtype, texts: Texts) -> Sequence[Tensor]:
    needed = [math.ceil(len(text) / BLOCK) for text in texts]
    backend = reference_backend(loaded, sum(needed) * BLOCK, BLOCK)
    backend.activate()
    runner = Runner(load_model(checkpoint(family, head_dim), backend).to(computed), backend)
    free = iter(range(1, 1 + sum(needed)))
    blocks = [[next(free) for _ in range(count)] for count in needed]
    return [
        runner.prefill(runner.batch([text], [owned], all_logits=True)).double()
        for text, owned in zip(texts, blocks, strict=True)
    ]


def check_logits(found: Mapping[tuple[int, int], Tensor], known: Truth) -> None:
    """Hold logits, by text and token, against the declarations'.

    Raises:
        AssertionError: they are farther off than rounding explains, or choose another token where there is no tie.
    """
    for (row, at), logits in found.items():
        where, mine = f"sequence {row}, token {at}", logits.double()
        rounded, exact = known.rounded[row][at], known.exact[row][at]
        if not bool(mine.isfinite().all()):
            raise AssertionError(f"{where}: not all logits are finite")
        distance, there = _rms(mine - exact), _rms(rounded - exact)
        if distance > TOKEN_RATIO * (there + known.mean):
            raise AssertionError(
                f"{where}: logits are {distance:.3g} from the exact ones, the reference's {there:.3g} there and "
                f"{known.mean:.3g} in the mean"
            )
        check_choice(where, int(mine.argmax()), known, row, at)


def check_choice(where: str, token: int, known: Truth, row: int, at: int) -> None:
    """The choice of ``token`` is the declarations', or equal to it but for rounding.

    Raises:
        AssertionError: it is neither.
    """
    rounded, exact = known.rounded[row][at], known.exact[row][at]
    best = int(rounded.argmax())
    apart = max(float((each[best] - each[token]).abs()) for each in (rounded, exact))
    if token != best and apart > TIE_RATIO * known.error(row, at):
        raise AssertionError(
            f"{where}: token {token} in place of {best}, which are {apart:.3g} apart, with an error of "
            f"{known.error(row, at):.3g}"
        )


def _rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())
