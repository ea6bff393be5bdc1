"""Modules shared by tests: models, checkpoints, drivers and references.

`pythonpath` in setup.cfg makes them importable.
"""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
