"""What tests of the CPU's kernels share."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hal.backends.cpu import packing
from hal.backends.cpu.native import build, compiler, prebuilt, processor

import hal
from hal.config import CompileCache, cache_folder


@pytest.fixture(autouse=True)
def not_kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep nothing of what tests measure, which they also make up."""
    if "kept" not in request.node.name:
        monkeypatch.setattr(packing, "kept", lambda key, measure: measure())


@pytest.fixture(autouse=True)
def not_prebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder of prebuilt libraries, in place of that of this checkout."""
    monkeypatch.setattr(prebuilt, "PREBUILT", tmp_path / "prebuilt")
    return tmp_path / "prebuilt"


@pytest.fixture(scope="module")
def native() -> hal.Backend:
    """Return a backend with the C++ kernels; raise if they cannot be built."""
    return hal.open({"backend": "cpu", "options": {"native": True}})


@pytest.fixture(params=[1, 2], ids="{} threads".format)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def emulated_tiles() -> ctypes.CDLL:
    """Return kernels with tile registers that functions emulate, so that AMX's code runs on any processor.

    The cache of the driver's kernels keeps them, for all workers and for later runs.
    """
    flags = ["-O1" if each == "-O3" else each for each in (*compiler.FLAGS, *processor.native_flags(None))]
    cache, program = CompileCache(cache_folder("cpu")), Path(compiler.compiler()[0])
    return build._load(build._compiled(cache, [*flags, "-DHAL_EMULATED_TILES"], program))
