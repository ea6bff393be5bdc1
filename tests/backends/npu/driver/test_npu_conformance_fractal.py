"""The conformance suite on the NPU driver with weights and cache in FRACTAL_NZ, a layout of the driver's own."""

from __future__ import annotations

from hal.testing import Conformance
from hal.testing.suite import *  # noqa: F403

conformance = Conformance(
    backend="npu",
    config={"options": {"nz_cache": True, "nz_weights": True}},
    # What a layout can change. test_npu.py has all.
    only=(
        "operations/*linear*", "operations/*cache*", "operations/*attention*", "rewrites/*", "graphs/*", "runners/*",
        "models/*", "limits/*", "leaks/steps/*",
    ),
)  # fmt: skip
