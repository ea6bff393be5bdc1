"""Marks the cases that `make test` leaves to `make test-all` or `make test-exhaustive`, with the reasons.

`make thorough` counts them. Most are more dtypes, draws and configurations of what `make test` runs in one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from helpers import ROOT

DTYPE = "another dtype; `make test` runs one"
DRAW = "another draw of arguments or orders; `make test` runs the first"
MODE = "another mode or configuration; `make test` runs one"
FAMILY = "another family of models through the same code"
OPERATION = "another operation through the same check"
LONG = "a long run"
PROCESSES = "many processes, each of which imports torch; `make test` runs other tests of the file"
AGAIN = "also checked by another command, or in parts by other tests"
EXHAUSTIVE = "a further combination, each part of which `make test-all` runs in another"
"""Left to `make test-exhaustive`, which takes as long as `make test-all` again."""


def thorough(reason: str, cases: str = "") -> pytest.MarkDecorator:
    """Leave a test, or some of its cases, to `make test-all`, or to `make test-exhaustive` if it is EXHAUSTIVE.

    Args:
        reason: why.
        cases: a regular expression that is found in the names of these cases, such as ``\\[seed=[1-9]``; all by
            default.
    """
    return pytest.mark.left_out(reason, cases)


spread = pytest.mark.spread
"""Leaves combinations of parameters to `make test-exhaustive`: `make test-all` runs each value at least once.

Of a test with three compilers and nine models, it runs the first compiler with the first model, and so on in turns.
"""


def mark(items: Sequence[pytest.Item], complete: bool) -> None:
    """Give the cases that :func:`thorough` and `spread` leave out their marks, by which `-m` selects.

    Args:
        items: all collected tests.
        complete: whether all tests of each file were collected.

    Raises:
        pytest.UsageError: an expression matches no case of its test, or `make test` would run nothing of a file.
    """
    for item in _beside_diagonals(items):
        item.add_marker(thorough(EXHAUSTIVE))
    matched: dict[tuple[Path, str, str], bool] = {}
    by_file: dict[Path, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.path, []).append(item)
        for each in item.iter_markers("left_out"):
            reason, cases = each.args
            found = re.search(cases, item.name) is not None
            key = item.path, reason, cases
            matched[key] = found or matched.get(key, False)
            if found:
                item.add_marker(pytest.mark.thorough(reason))
                if reason == EXHAUSTIVE:
                    item.add_marker(pytest.mark.exhaustive)
    for (path, _, cases), found in matched.items():
        if complete and not found:
            raise pytest.UsageError(f"no case of a test in {path} matches {cases!r}: mend the expression, or remove it")
    for file, tests in by_file.items():
        if complete and all(item.get_closest_marker("thorough") for item in tests):
            name = file.relative_to(ROOT)
            raise pytest.UsageError(f"`make test` would run nothing of {name}: leave one case in")


def _beside_diagonals(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases that `spread` leaves out."""
    tests: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("spread"):
            tests.setdefault((item.path, item.originalname), []).append(item)
    for cases in tests.values():
        groups = [
            [each.strip() for each in names.split(",")] if isinstance(names := mark.args[0], str) else list(names)
            for mark in cases[0].iter_markers("parametrize")
        ]
        groups += [[name] for name in cases[0].callspec.params if not any(name in names for names in groups)]
        places = []
        for names in groups:
            seen: dict[tuple[int, ...], int] = {}
            values = [tuple(id(each.callspec.params[name]) for name in names) for each in cases]
            places.append([seen.setdefault(value, len(seen)) for value in values])
        sizes = [max(column) + 1 for column in places]
        diagonal = {tuple(step % size for size in sizes) for step in range(max(sizes))}
        yield from (case for case, *place in zip(cases, *places, strict=True) if tuple(place) not in diagonal)


def reasons(items: Sequence[pytest.Item]) -> Counter[tuple[str, str]]:
    """Return the number of thorough cases, by file and reason."""
    return Counter(
        (str(item.path.relative_to(ROOT)), marker.args[0])
        for item in items
        if (marker := item.get_closest_marker("thorough"))
    )
