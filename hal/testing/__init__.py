"""The conformance suite: a pytest plugin that checks a driver against its contract.

``conformance.py`` holds the hook that a vendor's test module defines. ``suite.py``, ``conformance_report.py`` and the
plugin :mod:`pytest_hal` connect the suite to pytest. The other modules hold the cases of one area, or helpers.
Cases are generated from the declarations, so every declared operation is covered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hal.testing.conformance import Conformance

__all__ = ["Conformance"]


def __getattr__(name: str) -> Any:
    # Imported lazily: the report needs no cases.
    if name != "Conformance":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hal.testing.conformance import Conformance

    return Conformance
