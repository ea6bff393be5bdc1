"""What a vendor's test module imports: one test, which the plugin runs for each case of its ``conformance``."""

from __future__ import annotations

from hal.testing.case import Case, NotApplicable

__all__ = ["test_conformance"]


def test_conformance(conformance_case: Case) -> None:
    """One case of the suite."""
    try:
        conformance_case.run()
    except NotApplicable as reason:
        import pytest

        pytest.skip(str(reason))
