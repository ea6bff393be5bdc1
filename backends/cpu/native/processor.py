"""What the system says of the processor."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_line() -> str:
    """Return a line that lists the processor's features, or at least names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def processor_flags() -> frozenset[str]:
    """Return the features in Linux's names, such as avx2; empty on other systems."""
    return frozenset(processor_line().partition(":")[2].split())
