"""The conformance suite with the CPU driver."""

from __future__ import annotations

from hal.testing import Conformance
from hal.testing.suite import *  # noqa: F403

conformance = Conformance(backend="cpu")
