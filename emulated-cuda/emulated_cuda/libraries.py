"""The emulator's libraries, and where a process that runs on it has them."""

from __future__ import annotations

import os
from pathlib import Path

RUNTIME, DRIVER, OPERATIONS = "libcudart.so.13", "libcuda.so.1", "libemulated_operations.so"
LIBRARIES = "EMULATED_CUDA"
"""The environment variable with the folder of the libraries. If it is set, processes run on the emulator."""


def is_active() -> bool:
    """Return whether this process runs on the emulator."""
    return bool(os.environ.get(LIBRARIES))


def libraries() -> Path:
    """Return the folder of the emulator's libraries in a process that runs on it."""
    return Path(os.environ[LIBRARIES])
