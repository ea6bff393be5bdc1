"""The reports of comparisons, of two backends or of ranks: a verdict, what differs first, tables, and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from hal.compare.comparison_results import OUTSIDE, Choice, Comparison, Departure, Outcome, RankComparison

MOST_CHOICES = 8
"""Maximum number of differing tokens listed."""
UNEXPLAINED = (
    "no operation is out of tolerance on equal arguments: check what the model computes between operations, kernels "
    "whose results depend on earlier calls, and missing waits"
)


def heading(found: Comparison) -> str:
    """Return the verdict, and what was compared."""
    verdict = "within tolerance" if found.agrees else "NOT within tolerance"
    steps = f"a prefill and {found.steps - 1} decode steps"
    return f"{found.second} against {found.first}: {verdict} ({steps}, {found.tokens} tokens)"


def lines(found: Comparison) -> Iterator[str]:
    """Yield the findings."""
    if found.broken is not None:
        yield from _broken(found.broken, found.first, found.second)
    elif _has_operations(found):
        yield "operations: all are within tolerance"
    if found.departure is not None:
        yield from _departure(found.departure, found)
    yield from _tokens(found)
    yield from (f"not compared: {each}" for each in found.not_compared)


def table(found: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows, by layer."""
    if not _has_operations(found):
        return ["state", "drift", "rounding"], [
            [row.layer, _size(row.drift), _size(row.rounding)] for row in found.rows
        ]
    rows = []
    for row in found.rows:
        worst = ("-", "-") if row.worst is None else (row.worst.call.operation, _times(row.worst.error.ratio))
        rows.append([row.layer, str(row.operations), *worst, _size(row.drift), _size(row.rounding)])
    return ["layer", "calls", "worst operation", "error/tolerance", "drift", "rounding"], rows


def as_json(found: Comparison) -> dict[str, Any]:
    """Return all figures; non-finite numbers become strings, because JSON has none."""
    values = attrs.asdict(found)
    for choice, written in zip(found.choices, values["choices"], strict=True):
        written["tie"] = choice.tie
    finite: dict[str, Any] = _finite({"agrees": found.agrees, **values})
    return finite


def _has_operations(found: Comparison) -> bool:
    return any(row.operations for row in found.rows)


def _broken(outcome: Outcome, first: str, second: str) -> Iterator[str]:
    call, error = outcome.call, outcome.error
    yield (
        f"first operation out of tolerance: {call.operation} in {call.path} ({_layer(call.layer)}), "
        f"{_step(call.step)}, call {call.number}"
    )
    if error.problem:
        yield f"  {error.result}: {error.problem}"
    else:
        place = f"{error.result}{list(error.at)}"
        yield (
            f"  {place}: {second} returns {error.found:.6g}, {first} {error.expected:.6g}; "
            f"the difference is {_times(error.ratio)} times the allowed {error.allowed:.2g}"
        )
    given = ", ".join(f"{name} {value}" for name, value in outcome.arguments.items())
    yield f"  {given} -> {', '.join(outcome.results) or 'nothing'}"


def _departure(departure: Departure, found: Comparison) -> Iterator[str]:
    yield (
        f"the runs first differ by more than rounding in {departure.layer}, {_step(departure.step)}: the drift is "
        f"{_size(departure.drift)}, and rounding explains {_size(departure.limit)}"
    )
    if not _has_operations(found):
        layers = [row.layer for row in found.rows]
        before = layers[: layers.index(departure.layer)]
        since = f"from the attention over {before[-1]} on, " if before else "from the tokens on, "
        yield f"  check the computation {since}up to {departure.layer}"
    elif found.broken is None:
        yield f"  {UNEXPLAINED}"


def _tokens(found: Comparison) -> Iterator[str]:
    ties = [choice for choice in found.choices if choice.tie]
    others = [choice for choice in found.choices if not choice.tie]
    agreeing = found.tokens - len(found.choices)
    told = [f"{agreeing} of {found.tokens} agree"]
    told += [f"{len(ties)} differ by a tie"] if ties else []
    told += [f"{len(others)} differ"] if others else []
    yield f"tokens: {', '.join(told)}"
    yield from (f"  {_choice(choice, found)}" for choice in found.choices[:MOST_CHOICES])
    if (more := len(found.choices) - MOST_CHOICES) > 0:
        yield f"  and {more} more; --json lists all"


def _choice(choice: Choice, found: Comparison) -> str:
    return (
        f"prompt {choice.prompt}, {_step(choice.step)}: {found.first} chooses {choice.first}, {found.second} "
        f"{choice.second}; {'a' if choice.tie else 'no'} tie: the margin is {choice.margin:.3g}, and rounding explains "
        f"{choice.rounding:.3g}"
    )


def _layer(path: str) -> str:
    return path if path == OUTSIDE else f"layer {path.rpartition('.')[2]}"


def _step(step: int) -> str:
    return f"step {step} ({'decode' if step else 'prefill'})"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.3g}"


def _size(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def rank_heading(found: Sequence[RankComparison]) -> str:
    """Return the verdict on all ranks, and what was compared."""
    verdict = "within rounding" if all(each.agrees for each in found) else "NOT within rounding"
    first = found[0]
    steps = f"a prefill and {first.steps - 1} decode steps"
    return f"{first.ranks} ranks of {first.backend} against one: {verdict} ({steps}, {first.tokens} tokens)"


def rank_lines(found: Sequence[RankComparison]) -> Iterator[str]:
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


def rank_as_json(found: RankComparison) -> dict[str, Any]:
    """Return all figures of a rank."""
    return {"agrees": found.agrees, **attrs.asdict(found)}
