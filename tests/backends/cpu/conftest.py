"""What tests of the CPU's kernels share."""

from __future__ import annotations

import ctypes

import pytest
from hal.backends.cpu.native import build

from hal.config import CompileCache, cache_folder


@pytest.fixture(scope="session")
def emulated_tiles() -> ctypes.CDLL:
    """Return kernels with tile registers that functions emulate, so that AMX's code runs on any processor.

    The cache of the driver's kernels keeps them, for all workers and for later runs.
    """
    flags = [*("-O1" if each == "-O3" else each for each in build.FLAGS), "-DHAL_EMULATED_TILES"]
    return build._load(build._compiled(CompileCache(cache_folder("cpu")), flags) / build.LIBRARY)
