"""The test that a vendor's module imports; the plugin parametrizes it with the cases of ``conformance``."""

from __future__ import annotations

from hal.testing.case import Case, NotApplicable

__all__ = ["test_conformance"]


def test_conformance(conformance_case: Case) -> None:
    """Run one case of the suite."""
    try:
        conformance_case.run()
    except NotApplicable as reason:
        import pytest

        pytest.skip(str(reason))
