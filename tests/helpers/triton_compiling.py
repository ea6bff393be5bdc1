"""Compiling Triton's kernels for GPUs that are not there, and the fixtures of the tests that do.

The interpreter takes what the compiler refuses, and knows no registers. So here a driver of Triton's own kind names a
GPU, lets Triton and ptxas compile as for it, shared memory and all, and launches nothing.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import torch
import triton
from hal.backends.triton import KERNELS
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
SHARED = {80: 166912, 86: 101376, 90: 232448}
"""Bytes that a program may take, by compute capability: CUDA C++ Programming Guide, technical specifications."""


@attrs.frozen
class Compiled:
    """A kernel as ptxas left it: registers of a thread, and bytes of it in memory for want of more."""

    name: str
    registers: int
    spilled: int
    ptx: str


class Launcher:
    """Launches nothing, and notes what it would have launched."""

    launched: ClassVar[list[str]] = []

    def __init__(self, source: Any, metadata: Any) -> None:
        self.metadata = metadata

    def __call__(self, *args: Any) -> None:
        self.launched.append(self.metadata.name)


class Compiling(DriverBase):  # type: ignore[misc]
    """A driver for a GPU of a compute capability, as far as compiling needs one."""

    launcher_cls = Launcher

    def __init__(self) -> None:
        self.capability = 90
        self.utils = self
        self.compiled: list[Compiled] = []

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing runs here")

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED[device]}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Path, None, int, int, int]:
        """In place of loading: ask what it takes."""
        cubin = self.folder / f"{len(self.compiled)}.cubin"
        cubin.write_bytes(kernel)
        usage = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
        registers, stack = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK"))
        (ptx,) = (path for path in self.cache.glob("*/*.ptx") if path.with_suffix(".cubin").read_bytes() == kernel)
        self.compiled.append(Compiled(name, registers, stack, ptx.read_text()))
        return cubin, None, registers, stack, 1024


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiling]:
    driver = Compiling()
    driver.folder, driver.cache = tmp_path_factory.mktemp("cubin"), tmp_path_factory.mktemp("cache")
    triton.knobs.cache.dir = str(driver.cache)
    triton.runtime.driver.set_active(driver)
    return driver


@pytest.fixture(params=[80, 90], ids="sm_{}".format)
def compiling(request: pytest.FixtureRequest, driver: Compiling) -> Compiling:
    driver.capability = request.param
    return driver


def compiled(driver: Compiling, name: str, *arguments: Any) -> list[Compiled]:
    """Return what a call of an operation's kernel compiles."""
    before = len(driver.compiled)
    KERNELS[name](*arguments)
    return driver.compiled[before:]


def check_fits(kernel: Compiled, spilled: int = 0) -> None:
    assert kernel.spilled <= spilled, f"{kernel.name} spills {kernel.spilled} bytes of {kernel.registers} registers"


def check_product(kernel: Compiled, spilled: int = 0) -> None:
    check_fits(kernel, spilled)
    assert re.search(r"cp\.async\.cg\.shared\.global .*0x10", kernel.ptx), "it moves less than 16 bytes at once"
    assert re.search(r"mma\.sync|wgmma", kernel.ptx), "products are not the tensor cores'"


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor that takes no memory until it is written."""
    return torch.empty(shape, dtype=dtype)
