"""The conformance suite: what every driver must do, as a pytest plugin that vendors install.

conformance.py is the hook, suite.py and report.py are pytest's side of it with the plugin, :mod:`pytest_hal`, and each
other module holds the cases of an area, or what they share. Cases are made from declarations, so an operation is
covered the day it is declared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hal.testing.conformance import Conformance

__all__ = ["Conformance"]


def __getattr__(name: str) -> Any:
    # Late, because the report is made without any case.
    if name != "Conformance":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hal.testing.conformance import Conformance

    return Conformance
