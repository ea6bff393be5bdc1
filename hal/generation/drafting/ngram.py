"""Drafts from the text itself: what followed the same tokens before, in the prompt or in the new text.

Source: Saxena, *Prompt Lookup Decoding*, 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from weakref import WeakKeyDictionary

import attrs

from hal.checkpoint.checkpoint import Checkpoint
from hal.config import read
from hal.config.bounds import at_most
from hal.drivers.backend import Backend
from hal.errors import ConfigError
from hal.execution.runner import Runner
from hal.generation.drafting.drafter import DraftConfig, Drafter, DrafterType, DraftPlan, Drafts
from hal.generation.request import Request

LONGEST = 16
"""The most tokens of an n-gram."""


@attrs.frozen
class NgramOptions:
    """What counts as the same tokens.

    Attributes:
        shortest: the fewest tokens.
        longest: the most tokens. Longer equal parts are preferred.
    """

    shortest: int = attrs.field(default=2, validator=at_most(LONGEST))
    longest: int = attrs.field(default=5, validator=at_most(LONGEST))

    def __attrs_post_init__(self) -> None:
        if self.shortest > self.longest:
            raise ConfigError(
                f"draft.options.shortest is {self.shortest}, and longest {self.longest}", "give shortest <= longest"
            )


class TextIndex:
    """Where each short sequence of tokens of a text ended last. Tokens are added at the end."""

    def __init__(self, options: NgramOptions) -> None:
        self._options = options
        self._behind: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def following(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return up to ``most`` tokens that followed the longest known end of a text, where it occurred last.

        Args:
            tokens: the text, which begins with that of the last call.
        """
        sizes = range(self._options.longest, self._options.shortest - 1, -1)
        for end in range(self._indexed + 1, len(tokens)):  # The end of the text itself has nothing behind it.
            for size in sizes:
                if size <= end:
                    self._behind[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, len(tokens) - 1)
        for size in sizes:
            start = self._behind.get(tuple(tokens[-size:])) if size < len(tokens) else None
            if start is not None:
                found = list(tokens[start : start + most])
                while len(found) < most:  # The text repeats itself up to its end, and may go on so.
                    found.append(found[len(found) - (len(tokens) - start)])
                return found
        return []


class NgramDrafter(Drafter):
    """Looks each text's end up in the text before it."""

    predicts = False

    def __init__(self, tokens: int, options: NgramOptions) -> None:
        self.tokens = tokens
        self._options = options
        self._texts: WeakKeyDictionary[Request, TextIndex] = WeakKeyDictionary()

    def propose(self, requests: Sequence[Request], most: int) -> Drafts:
        """Draft what followed the last tokens of each text before."""
        found = []
        for each in requests:
            if each not in self._texts:
                self._texts[each] = TextIndex(self._options)
            found.append(self._texts[each].following(each.tokens, most))
        return Drafts(list(map(len, found)), found)


@attrs.frozen
class NgramPlan(DraftPlan):
    """The drafter needs nothing of the model."""

    tokens: int
    options: NgramOptions

    def open(self, runner: Runner, stack: ExitStack, max_sequences: int, max_length: int) -> Drafter:
        """Return the drafter."""
        return NgramDrafter(self.tokens, self.options)


class Ngram(DrafterType):
    """``ngram``: what followed the same tokens in the text."""

    name = "ngram"

    def plan(self, config: DraftConfig, checkpoint: Checkpoint, backend: Backend) -> DraftPlan:
        """Read the options."""
        if config.model is not None:
            raise ConfigError(f"draft.model is {config.model!r}, and ngram reads no model", "leave it out")
        return NgramPlan(config.tokens, read(NgramOptions, config.options, "draft.options"))
