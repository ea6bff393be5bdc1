"""The command of a child process that imports the same hal as this process."""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def child_python() -> list[str]:
    """Return the command of a Python that imports the same hal as this process, also with ``-m`` or ``-c``.

    With these, Python searches the current folder first. ``-P`` leaves the folder out if it has another hal, as a
    checkout has.
    """
    other = Path("hal", "__init__.py")
    shadows = other.exists() and not other.samefile(PACKAGE / other.name)
    return [sys.executable, *(["-P"] if shadows else [])]
