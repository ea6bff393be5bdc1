"""Texts with and without drafts, by turns: tokens a second, and what the model accepts, by place."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import attrs

import hal
from hal.generation.drafting.draft_length import Acceptance
from hal.generation.drafting.drafter import DraftConfig
from hal.progress import Rounds, Say, going_on, silent, since_start

PROMPTS = (
    "def mean(values):\n    return sum(values) / len(values)\n\n\ndef median(values):\n    return",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n\n    def",
    "for name in names:\n    print(name)\n\nfor value in values:\n    print(value)\n\nfor key in",
    "assert add(1, 2) == 3\nassert add(2, 2) == 4\nassert add(3, 2) == 5\nassert add(",
)
"""The prompts, if none are given."""
NEW_TOKENS = 64
"""The new tokens of each prompt."""


@attrs.frozen
class DraftSpeed:
    """The speed of a batch size with a compiler.

    Attributes:
        batch_size: the texts that run together.
        compiler: how steps run.
        tokens: the new tokens of a round.
        plain_seconds: the duration of each round without drafts.
        draft_seconds: the duration of each round with drafts.
        equal: the part of the texts that are equal with and without. Rounding turns others at ties.
        acceptance: the drafted tokens that the model accepted.
    """

    batch_size: int
    compiler: str
    tokens: int
    plain_seconds: list[float]
    draft_seconds: list[float]
    equal: float
    acceptance: Acceptance

    @property
    def ratio(self) -> float:
        """How many times as fast texts are with drafts: the median of the rounds."""
        return median(plain / draft for plain, draft in zip(self.plain_seconds, self.draft_seconds, strict=True))

    def as_json(self) -> dict[str, Any]:
        """Return all figures. Times are in seconds."""
        return {**attrs.asdict(self), "ratio": self.ratio, "acceptance_by_place": self.acceptance.by_place}


def measure(
    checkpoint: str | Path,
    draft: DraftConfig,
    config: Mapping[str, Any],
    *,
    batch_size: int,
    compiler: str,
    repeats: int,
    prompts: Sequence[str] = PROMPTS,
    say: Say = silent,
) -> DraftSpeed:
    """Generate greedily with and without drafts, by turns, after a round that is not timed.

    Args:
        checkpoint: the model's.
        draft: how tokens are drafted.
        config: keys of the configuration.
        batch_size: the texts that run together.
        compiler: how steps run.
        repeats: the timed rounds.
        prompts: the prompts, each of which is continued in every round.
        say: called with progress messages, also from another thread.

    Raises:
        HalError: the model cannot be run, or the drafter does not fit it.
    """
    say = since_start(say)
    with ExitStack() as stack:
        sides = []
        for each in (None, draft):
            with going_on(say, f"loading {checkpoint}{'' if each is None else f' with drafts of {draft.method}'}"):
                llm = hal.LLM(checkpoint, compiler=compiler, max_sequences=batch_size, draft=each, config=config)
            sides.append(stack.enter_context(llm))
        seconds: tuple[list[float], list[float]] = [], []
        texts: list[list[Any]] = [_texts(llm, prompts, batch_size) for llm in sides]
        before = sides[1].acceptance
        done = Rounds(say, "timing", repeats)
        for number in range(repeats):
            for index in (0, 1) if number % 2 == 0 else (1, 0):
                began = time.perf_counter()
                texts[index] = _texts(sides[index], prompts, batch_size)
                seconds[index].append(time.perf_counter() - began)
            done.ended(number + 1)
        after = sides[1].acceptance
    assert before is not None
    assert after is not None
    equal = sum(plain == drafted for plain, drafted in zip(*texts, strict=True)) / len(prompts)
    tokens = sum(map(len, texts[0]))
    return DraftSpeed(batch_size, compiler, tokens, *seconds, equal, after.since(before))


def _texts(llm: hal.LLM, prompts: Sequence[str], batch_size: int) -> list[Sequence[int]]:
    found: list[Sequence[int]] = []
    for start in range(0, len(prompts), batch_size):
        some = list(prompts[start : start + batch_size])
        made = llm.generate(some, max_new_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
        found += [each.token_ids for each in made]
    return found


def table(found: Sequence[DraftSpeed]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows."""
    columns = ["batch", "compiler", "tokens/s", "with drafts", "ratio", "accepted by place", "equal texts"]
    rows = []
    for each in found:
        rates = [f"{each.tokens / median(some):.1f}" for some in (each.plain_seconds, each.draft_seconds)]
        places = ", ".join(f"{100 * part:.0f} %" for part in each.acceptance.by_place)
        row = [str(each.batch_size), each.compiler, *rates, f"{each.ratio:.2f}", places, f"{100 * each.equal:.0f} %"]
        rows.append(row)
    return columns, rows
