"""Modules shared by the tests: draws, references, and processes of their own."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parents[1]
DOCS = ROOT / "docs"
