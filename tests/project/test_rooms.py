"""Tests that CONTRIBUTING and the map of rooms name every room, also among its decisions, and only files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

NO_ROOM = ("hal/__pycache__", "backends/__pycache__")


def rooms(repository: Path) -> set[str]:
    folders = [each for parent in ("hal", "backends") for each in (repository / parent).iterdir()]
    folders = [each for each in folders if each.is_dir() and not each.is_symlink()]
    found = {each.relative_to(repository).as_posix() for each in folders} - set(NO_ROOM)
    return found | {"models", "emulated-cann", "emulated-cuda"}


def first_cells(page: Path) -> set[str]:
    """Return the names in backquotes in the first column of a page's tables."""
    rows = re.findall(r"^\| (`[^|]*`) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/reference/rooms.md"])
def test_every_room_is_there(repository: Path, page: str) -> None:
    assert rooms(repository) - first_cells(repository / page) == set()


def test_every_room_decides_something(repository: Path) -> None:
    text = (repository / "docs/reference/rooms.md").read_text(encoding="utf-8")
    table = text[text.index("| decision | file |") :].partition("\n\n")[0]
    named = {path for path in re.findall(r"`([\w./-]+)`", table) if "/" in path}
    assert {room for room in rooms(repository) if not any(f"{path}/".startswith(f"{room}/") for path in named)} == set()


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/reference/rooms.md"])
def test_what_is_named_exists(repository: Path, page: str) -> None:
    named = re.findall(
        r"`((?:hal|backends|models|tests|emulated-cann|emulated-cuda)/[\w./-]+)`",
        (repository / page).read_text(encoding="utf-8"),
    )
    assert len(named) > 10
    assert [path for path in named if not (repository / path).exists()] == []


def test_areas_are_the_folders_of_tests(repository: Path) -> None:
    text = (repository / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text[text.index("| `AREA` | tests |") :].partition("\n\n")[0]
    listed = set(re.findall(r"`([a-z-]+)`", "".join(row.split("|")[1] for row in table.splitlines()[2:])))
    tests = repository / "tests"
    parents = (tests, tests / "backends", tests / "backends" / "npu")
    folders = {each.name for parent in parents for each in parent.iterdir() if any(each.glob("**/test_*.py"))}
    assert listed == folders - {"backends", "helpers"} | {"emulated-cann"}


def test_links_of_contributing_lead_to_files(repository: Path) -> None:
    text = (repository / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [link for link in re.findall(r"\]\(([^)#\s]+)\)", text) if not (repository / link).exists()] == []
