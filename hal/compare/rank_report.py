"""The report of a comparison of ranks with a single device, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from hal.compare.comparison_results import RankComparison


def heading(found: Sequence[RankComparison]) -> str:
    """Return the verdict on all ranks, and what was compared."""
    verdict = "within rounding" if all(each.agrees for each in found) else "NOT within rounding"
    first = found[0]
    steps = f"a prefill and {first.steps - 1} decode steps"
    return f"{first.ranks} ranks of {first.backend} against one: {verdict} ({steps}, {first.tokens} tokens)"


def lines(found: Sequence[RankComparison]) -> Iterator[str]:
    """Yield the findings of each rank."""
    for each in found:
        counts = f"{each.compared} results compared" + (f", {each.partial} partial sums not" if each.partial else "")
        if each.first is None:
            yield f"rank {each.rank}: no operation differs ({counts})"
        else:
            call = each.first.call
            yield (
                f"rank {each.rank}: the first operation that differs is {call.operation} in {call.path}, "
                f"step {call.step}, call {call.number}: by {each.first.drift:.2g}, and rounding explains "
                f"{each.first.limit:.2g} ({counts})"
            )
        for choice in each.choices:
            why = "a tie, up to rounding" if choice.tie else "more than rounding explains"
            yield (
                f"rank {each.rank}: prompt {choice.prompt}, step {choice.step}: token {choice.second} and not "
                f"{choice.first}; {why}"
            )


def as_json(found: RankComparison) -> dict[str, Any]:
    """Return all figures of a rank."""
    return {"agrees": found.agrees, **attrs.asdict(found)}
