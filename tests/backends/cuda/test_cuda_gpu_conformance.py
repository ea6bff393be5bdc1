"""The conformance suite with the CUDA driver. Without a GPU it has one case, which is skipped with the reason."""

from __future__ import annotations

from hal.testing import Conformance
from hal.testing.suite import *  # noqa: F403

conformance = Conformance(backend="cuda")
