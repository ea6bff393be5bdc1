"""The report of a run: a table by area, and the smallest failing shapes of each operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

COLUMNS = ("cases", "passed", "skipped", "expected to fail", "failed")
_COLUMN_OF = {
    "passed": "passed",
    "skipped": "skipped",
    "xfailed": "expected to fail",
    "failed": "failed",
    "error": "failed",
    "xpassed": "failed",
}


@attrs.frozen
class Outcome:
    """The result of one case.

    Attributes:
        backend: title of the hook that the case belongs to.
        column: column of the table that counts the case.
        operation: name of the operation that failed, or an empty string.
        size: number of elements of these arguments.
    """

    backend: str
    area: str
    name: str
    column: str
    operation: str = ""
    shapes: str = ""
    size: int = 0

    @classmethod
    def of(cls, kind: str, properties: Mapping[str, Any], key: str) -> Outcome:
        """Create an outcome from pytest's outcome and the properties that the plugin recorded on the report."""
        backend, area, name = properties[key]
        failure = properties.get(f"{key}_shapes", ("", "", 0)) if kind == "failed" else ("", "", 0)
        return cls(backend, area, name, _COLUMN_OF[kind], *failure)


def summary(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the lines of the report on one backend."""
    areas = dict.fromkeys(each.area for each in sorted(outcomes, key=lambda each: each.area))
    yield f"{'area':<12}" + "".join(f"{column:>{len(column) + 3}}" for column in COLUMNS)
    for area in areas:
        yield _row(area, [each for each in outcomes if each.area == area])
    yield _row("all", outcomes)
    smallest: dict[str, Outcome] = {}
    for each in outcomes:
        if each.operation and (each.operation not in smallest or each.size < smallest[each.operation].size):
            smallest[each.operation] = each
    for each in smallest.values():
        yield f"{each.operation} fails; smallest failing shapes: {each.shapes} ({each.name})"


def _row(name: str, outcomes: Sequence[Outcome]) -> str:
    counts = Counter(each.column for each in outcomes)
    counts["cases"] = len(outcomes)
    return f"{name:<12}" + "".join(f"{counts[column]:>{len(column) + 3}}" for column in COLUMNS)
