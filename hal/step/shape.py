"""The shape of a step, which selects the form that runs it."""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.frozen
class StepShape:
    """The numbers of tokens, sequences and queries of one step.

    Attributes:
        tokens: new tokens of all sequences.
        sequences: sequences in the batch.
        queries: new tokens of each sequence, if all have the same number; else 0.
    """

    tokens: int
    sequences: int
    queries: int

    @classmethod
    def uniform(cls, sequences: int, queries: int = 1) -> StepShape:
        """Return the shape of a step of ``sequences`` sequences with ``queries`` new tokens each."""
        return cls(sequences * queries, sequences, queries)

    @classmethod
    def of_starts(cls, tokens: int, starts: Sequence[int]) -> StepShape:
        """Return the shape of a step of ``tokens`` tokens whose ``query_start_loc`` is ``starts``."""
        sequences = len(starts) - 1
        queries = tokens // sequences if sequences else 0
        if not queries or list(starts) != list(range(0, tokens + 1, queries)):
            queries = 0
        return cls(tokens, sequences, queries)

    def __str__(self) -> str:
        if not self.sequences:
            return _count(self.tokens, "token")
        if self.queries == 1:
            return _count(self.sequences, "sequence")
        if self.queries:
            return f"{_count(self.sequences, 'sequence')} of {self.queries} tokens each"
        return f"{self.tokens} tokens of {_count(self.sequences, 'sequence')}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def one_query_each(tokens: int, starts: list[int]) -> bool:
    """Return whether every sequence has exactly one query.

    Args:
        tokens: the number of queries.
        starts: the values of ``query_start_loc``.
    """
    return starts == list(range(tokens + 1))
