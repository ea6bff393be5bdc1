"""The conformance suite on the NPU driver with weights and cache in FRACTAL_NZ, a layout of the driver's own."""

from __future__ import annotations

from hal.testing import Conformance
from hal.testing.suite import *  # noqa: F403

conformance = Conformance(backend="npu", config={"options": {"nz_cache": True, "nz_weights": True}})
