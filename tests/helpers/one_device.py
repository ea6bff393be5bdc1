"""The tokens and logits of one device, with which those of ranks are compared by the rule for ties.

The rule is :mod:`hal.ops.rounding`'s: the ranks' logits are as close to those of float32 as one device's, up to a
factor, and where the ranks choose another token, the two tokens' logits differ by no more than rounding moves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import attrs
import torch

from hal.ops.rounding import ReferenceLogits, check_choice, check_logits, margin
from helpers import rank_programs


@attrs.frozen
class OneDevice:
    """The greedy tokens of one device, in eager steps.

    Attributes:
        texts: each prompt's new tokens.
        known: the logits that choose them, and their rounding errors against the CPU's float32.
    """

    texts: list[list[int]]
    known: ReferenceLogits

    @classmethod
    def of(cls, checkpoint: Path, dtype: str, on: dict[str, Any]) -> Self:
        """Run a checkpoint on one device, and on the CPU in float32 along the same tokens."""
        given: dict[str, Any] = {"checkpoint": str(checkpoint), "compilers": ["eager"], "parallel": {}}
        texts = rank_programs.tokens(**given, dtype=dtype, on=on)["eager"]
        rounded, exact = (
            rank_programs.tokens(**given, dtype=each, on=where, continuations=texts)["logits of eager"]
            for each, where in ((dtype, on), ("float32", None))
        )
        return cls(texts, ReferenceLogits.of(rounded, exact, getattr(torch, dtype)))

    def check(self, ranks: Sequence[dict[str, Any]], compiler: str) -> str:
        """Check the results of ``tokens`` in :mod:`helpers.rank_programs`, along this device's tokens.

        Args:
            ranks: what each rank returns.
            compiler: the compiler to check.

        Returns:
            The counts, to print.

        Raises:
            AssertionError: the ranks have different tokens, or differ from this device by more than rounding.
        """
        texts = ranks[0][compiler]
        assert all(rank[compiler] == texts for rank in ranks), "the ranks have different tokens"
        ties = [tie for row, text in enumerate(texts) if (tie := self._first_tie(row, text))]
        worst, mean, choices = 0.0, 0.0, 0
        for rank in ranks:
            along = rank[f"logits of {compiler}"]
            found = {(row, at): logits for row, text in enumerate(along) for at, logits in enumerate(text)}
            assert len(found) == sum(map(len, self.texts))
            agreement = check_logits(found, self.known)
            worst, mean = max(worst, agreement.worst), max(mean, agreement.mean)
            choices = max(choices, agreement.ties)
        return (
            f"{compiler}: {sum(map(len, texts))} tokens on {len(ranks)} ranks; error {mean:.2f} times one device's, "
            f"{worst:.2f} times a token's; {choices} ties along its texts; {', '.join(ties) or 'the same texts'}"
        )

    def _first_tie(self, row: int, text: list[int]) -> str:
        """Return where a text differs from this device's, which it may from a tie on, or an empty string."""
        assert len(text) == len(self.texts[row])
        for at, token in enumerate(text):
            if check_choice(f"text {row}, new token {at}", token, self.known, row, at):
                runs = self.known.rounded[row][at], self.known.exact[row][at]
                apart, error = margin(runs, self.texts[row][at], token), self.known.error(row, at)
                return f"text {row} has a tie at token {at}, of logits {apart:.3g} apart, rounding error {error:.3g}"
        return ""
