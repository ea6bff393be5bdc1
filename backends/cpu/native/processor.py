"""The processor's features."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def processor_line() -> str:
    """Return a line that lists the processor's features, or at least names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def processor_flags() -> frozenset[str]:
    """Return the features in Linux's names, such as avx2; empty on other systems."""
    return _listed() - unusable_flags()


def unusable_flags() -> frozenset[str]:
    """Return the features that the system lists and the processor does not have: an emulated one has fewer."""
    asked = {name.replace("_", ""): bool(has) for name, has in torch.cpu.get_capabilities().items()}
    return frozenset(name for name in _listed() if not asked.get(name.replace("_", ""), True))


def _listed() -> frozenset[str]:
    return frozenset(processor_line().partition(":")[2].split())
