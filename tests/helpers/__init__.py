"""Modules shared by tests: models, checkpoints, drivers and references.

`pythonpath` in setup.cfg makes them importable.
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]  # pythonpath may have ".." in it
ROOT = TESTS.parent


def console_script(name: str) -> Path | None:
    """Return a console script of this environment, or of one whose packages it sees; None if neither has it."""
    bases = [Path(each).parents[2] for each in sys.path if Path(each).name == "site-packages"]
    found = (folder / "bin" / name for folder in (Path(sys.prefix), *bases))
    return next((path for path in found if path.exists()), None)
