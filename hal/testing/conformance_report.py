"""The report of a run: a table by area, and for each operation that fails the smallest shapes that show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

COLUMNS = ("cases", "passed", "skipped", "expected to fail", "failed")
_COLUMN_OF = {
    "passed": "passed", "skipped": "skipped", "xfailed": "expected to fail", "failed": "failed", "error": "failed",
    "xpassed": "failed",
}  # fmt: skip


@attrs.frozen
class Outcome:
    """What came of a case.

    Attributes:
        backend: that it is a case of, as the hook's title has it.
        area: of the case.
        name: of the case.
        column: of the table, that it counts in.
        operation: that failed, or nothing.
        shapes: that it failed at.
        size: elements of these.
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
        """From pytest's word for it, and what the plugin noted on the report."""
        backend, area, name = properties[key]
        shown = properties.get(f"{key}_shapes", ("", "", 0)) if kind == "failed" else ("", "", 0)
        return cls(backend, area, name, _COLUMN_OF[kind], *shown)


def summary(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The lines of the report on one backend."""
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
        yield f"{each.operation} fails; the smallest shapes that show it: {each.shapes} ({each.name})"


def _row(name: str, outcomes: Sequence[Outcome]) -> str:
    counts = Counter(each.column for each in outcomes)
    counts["cases"] = len(outcomes)
    return f"{name:<12}" + "".join(f"{counts[column]:>{len(column) + 3}}" for column in COLUMNS)
