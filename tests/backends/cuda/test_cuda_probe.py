"""Tests for the CUDA driver's probe: it names what is missing, with a remedy, and does not import torch."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hal.backends.cuda.probe import INSTALL, LIBRARY, loadable, probe

from hal.drivers.torch_build import installed_torch

VERSION = """from typing import Optional
__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']
__version__ = '{version}'
debug = False
cuda: Optional[str] = {cuda}
git_version = 'cf30153c4c131c8164ee7798e5022d810682e2cb'
hip: Optional[str] = {hip}
xpu: Optional[str] = None
"""


class Machine:
    """A simulated machine: an installed torch, a folder of device files, and a folder of libraries."""

    def __init__(self, folder: Path) -> None:
        self.torch, self.devices, self.libraries = (folder / name for name in ("torch", "dev", "lib"))
        for each in (self.torch, self.devices, self.libraries):
            each.mkdir()
        self.environ = {"LD_LIBRARY_PATH": str(self.libraries)}
        self.install()
        (self.libraries / LIBRARY).touch()
        for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
            (self.devices / name).touch()

    def install(self, version: str = "2.11.0+cu130", cuda: str = "'13.0'", hip: str = "None") -> None:
        text = VERSION.format(version=version, cuda=cuda, hip=hip)
        (self.torch / "version.py").write_text(text, encoding="utf-8")

    def find(self, name: str) -> Any:
        return SimpleNamespace(origin=str(self.torch / "__init__.py")) if name == "torch" else None

    def probe(self, library: Callable[[Any], bool] | None = None, **given: Any) -> Any:
        return probe(self.environ, self.devices, given.pop("find_spec", self.find), library, **given)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_whole_machine(machine: Machine) -> None:
    found = machine.probe()
    assert found.available
    assert found.reason == "torch for CUDA 13.0, and 2 GPUs"
    (machine.devices / "nvidia1").unlink()
    assert machine.probe().reason == "torch for CUDA 13.0, and 1 GPU"


def test_torch_is_missing(machine: Machine) -> None:
    found = machine.probe(find_spec=lambda name: None)
    assert not found.available
    assert (found.reason, found.hint) == ("torch is not installed", INSTALL)


@pytest.mark.parametrize(
    ("version", "hip", "built"), [("2.13.0+cpu", "None", "for the CPU only"), ("2.13.0+rocm6.4", "'6.4.2'", "for ROCm")]
)
def test_torch_is_built_for_something_else(machine: Machine, version: str, hip: str, built: str) -> None:
    machine.install(version, "None", hip)
    found = machine.probe()
    assert not found.available
    assert found.reason == f"the installed torch {version} is a build {built}"
    assert "install a build for CUDA: pip install torch --index-url" in found.hint


def test_torch_does_not_say_what_it_is_built_for(machine: Machine) -> None:
    (machine.torch / "version.py").unlink()
    assert "the CUDA version of torch cannot be read" in machine.probe().reason


def test_the_installed_torch_says_what_it_is() -> None:
    """The probe's description of the installed torch is that of the module."""
    import torch

    found = installed_torch()
    assert found is not None
    assert found.version == torch.__version__
    assert found.platforms.get("cuda") == torch.version.cuda


@pytest.mark.parametrize("value", ["", " ", "-1"])
def test_the_gpus_are_hidden(machine: Machine, value: str) -> None:
    machine.environ["CUDA_VISIBLE_DEVICES"] = value
    found = machine.probe()
    assert not found.available
    assert found.reason == f"CUDA_VISIBLE_DEVICES is {value!r}, which hides every GPU"
    machine.environ["CUDA_VISIBLE_DEVICES"] = "1"
    assert machine.probe().available


def test_the_driver_is_missing(machine: Machine) -> None:
    found = machine.probe(lambda environ: False)
    assert not found.available
    assert found.reason.endswith(f"NVIDIA's driver is not installed: {LIBRARY} was not found")
    assert "install the NVIDIA driver" in found.hint


def test_where_the_library_is_looked_for(tmp_path: Path) -> None:
    library = tmp_path / "far" / LIBRARY
    library.parent.mkdir()
    cache = tmp_path / "ld.so.cache"
    cache.write_bytes(b"glibc-ld.so.cache1.1\0libc.so.6\0/lib/libc.so.6\0" + f"{LIBRARY}\0{library}\0".encode())
    here = loadable({}, tmp_path / "nothing")  # what this machine has
    assert loadable({}, cache) == loadable({"LD_LIBRARY_PATH": f":{library.parent}"}, tmp_path / "nothing") == here
    library.touch()
    assert loadable({}, cache)
    assert loadable({"LD_LIBRARY_PATH": f":{library.parent}"}, tmp_path / "nothing")


@pytest.mark.parametrize("left", [(), ("nvidiactl", "nvidia-uvm")])
def test_a_gpu_is_missing(machine: Machine, left: tuple[str, ...]) -> None:
    for each in machine.devices.iterdir():
        if each.name not in left:
            each.unlink()
    found = machine.probe()
    assert not found.available
    assert (
        found.reason == f"NVIDIA's driver is installed, but no GPU was found: {machine.devices}/nvidia0 does not exist"
    )
    assert "--gpus all" in found.hint


def test_windows_shares_its_gpu(machine: Machine) -> None:
    for each in machine.devices.iterdir():
        each.unlink()
    (machine.devices / "dxg").touch()
    assert machine.probe().reason == "torch for CUDA 13.0, and a GPU that Windows shares"


@pytest.mark.parametrize(
    ("closed", "named"), [({"nvidia0", "nvidia1"}, "nvidia0"), ({"nvidiactl"}, "nvidiactl"), ({"nvidia0"}, None)]
)
def test_the_permission_is_missing(machine: Machine, closed: set[str], named: str | None) -> None:
    found = machine.probe(access=lambda path, mode: path.name not in closed)
    if named is None:  # one accessible GPU is enough
        assert found.reason == "torch for CUDA 13.0, and 1 GPU"
    else:
        assert found.reason == f"no permission to use {machine.devices / named}"


def test_it_takes_less_than_50_ms(machine: Machine) -> None:
    for each in (machine.probe, probe):  # a simulated machine, and this one
        start = time.perf_counter()
        each()
        assert time.perf_counter() - start < 0.05


def test_torch_is_not_imported_and_cuda_not_initialised() -> None:
    program = """
import sys
from importlib.util import spec_from_file_location, module_from_spec
import torch
import hal.drivers.driver
before = set(sys.modules)
from hal.backends.cuda.driver import CudaDriver
CudaDriver().probe()
assert not torch.cuda.is_initialized()
print(sorted(name for name in set(sys.modules) - before if name.partition(".")[0] in ("torch", "triton", "flashinfer")))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr
