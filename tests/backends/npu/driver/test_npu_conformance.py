"""The conformance suite with the NPU driver, on the emulated CANN."""

from __future__ import annotations

from hal.testing import Conformance
from hal.testing.suite import *  # noqa: F403

conformance = Conformance(backend="npu", ranks={"options": {"emulator": "on"}})
