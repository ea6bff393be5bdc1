"""What tests of the CPU's kernels share."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
from hal.backends.cpu.native import build

SOURCES = (
    "attention",
    "embedding",
    "packed_linear",
    "packed_linear_tiles",
    "pages",
    "plain_linear",
    "prompt_attention",
    "quantized_cache",
    "replay",
    "weight_only",
    "weight_only_columns",
    "weight_only_tiles",
)


@pytest.fixture(scope="session")
def emulated_tiles(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Return kernels with tile registers that functions emulate, so that AMX's code runs on any processor."""
    library = tmp_path_factory.mktemp("tiles") / "tiles.so"
    sources = [str(build.SOURCES / f"{name}.cpp") for name in SOURCES]
    flags = ["-O1" if each == "-O3" else each for each in build.FLAGS]
    command = [*build._compiler(), *flags, "-shared", "-DHAL_EMULATED_TILES", *sources, "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))
