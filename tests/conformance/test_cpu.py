"""The conformance suite on the CPU driver."""

from __future__ import annotations

from hal.testing import Conformance
from hal.testing.suite import *  # noqa: F403

conformance = Conformance(
    backend="cpu",
    failing={
        "operations/paged_attention/*/infinity": "torch's flash attention and the C++ kernel give finite results for "
        "an infinite query, where the declaration gives NaN",
    },
)
