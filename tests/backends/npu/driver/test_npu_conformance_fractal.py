"""The conformance suite with the NPU driver, with weights and cache in the FRACTAL_NZ layout."""

from __future__ import annotations

from hal.testing import Conformance
from hal.testing.suite import *  # noqa: F403

conformance = Conformance(
    backend="npu",
    config={"options": {"nz_cache": True, "nz_weights": True}},
    # The areas that a layout can affect. test_npu_conformance.py has all areas.
    only=(
        "operations/*linear*",
        "operations/*cache*",
        "operations/*attention*",
        "rewrites/*",
        "graphs/*",
        "runners/*",
        "models/*",
        "limits/*",
        "leaks/steps/*",
    ),
)
