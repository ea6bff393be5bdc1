"""What tests share and is no test: models, checkpoints, drivers and references. `pythonpath` in setup.cfg finds it."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
