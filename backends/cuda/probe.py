"""Detection of torch, NVIDIA's driver and GPUs, without importing torch or opening a device."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from hal.drivers.driver import Probe
from hal.drivers.torch_build import FindSpec, TorchBuild, installed_torch

LIBRARY = "libcuda.so.1"
"""The NVIDIA driver's library, which torch loads."""
FOLDERS = (
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
)
"""Folders to search in addition to LD_LIBRARY_PATH and the loader's cache."""
CACHE = Path("/etc/ld.so.cache")
DEVICES = Path("/dev")
WSL = "dxg"
"""The device file of the GPU in the Windows Subsystem for Linux."""
INSTALL = "pip install torch --index-url https://download.pytorch.org/whl/cu130 (or the cu12x that the driver supports)"
OTHER_BUILD = f"install a build for CUDA: {INSTALL}"


def probe(
    environ: Mapping[str, str] = os.environ,
    devices: Path = DEVICES,
    find_spec: FindSpec = importlib.util.find_spec,
    library: Callable[[Mapping[str, str]], bool] | None = None,
    access: Callable[[Path, int], bool] = os.access,
) -> Probe:
    """Check for a CUDA build of torch, NVIDIA's driver, a GPU and access to it; report the first that is missing.

    Args:
        environ: the process's environment variables.
        devices: the folder of device files.
        find_spec: finds an importable package.
        library: returns whether the loader finds NVIDIA's library; None is :func:`loadable`.
        access: returns whether a file is accessible, like :func:`os.access`.
    """
    try:
        build = installed_torch(find_spec)
    except OSError as error:
        return Probe(
            False, f"the CUDA version of torch cannot be read: {error}", f"install a build for CUDA: {INSTALL}"
        )
    if build is None:
        return Probe(False, "torch is not installed", INSTALL)
    cuda = build.platforms.get("cuda")
    if cuda is None:
        return Probe(False, _describe(build), OTHER_BUILD)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return Probe(
            False, f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides every GPU", "unset it, or list the GPUs to use"
        )
    if not (library or loadable)(environ):
        return Probe(
            False,
            f"torch is built for CUDA {cuda}, but NVIDIA's driver is not installed: {LIBRARY} was not found",
            "install the NVIDIA driver; in a container, start it with the GPUs (docker run --gpus all)",
        )
    if (devices / WSL).exists():
        return Probe(True, f"torch for CUDA {cuda}, and a GPU that Windows shares")
    gpus = sorted(each for each in devices.glob("nvidia[0-9]*") if each.name[6:].isdigit())
    if not gpus:
        return Probe(
            False,
            f"NVIDIA's driver is installed, but no GPU was found: {devices}/nvidia0 does not exist",
            "run nvidia-smi to find the cause; in a container, start it with the GPUs (docker run --gpus all)",
        )
    usable = [each for each in gpus if access(each, os.R_OK | os.W_OK)]
    control = devices / "nvidiactl"
    closed = [] if usable else gpus[:1]
    if control.exists() and not access(control, os.R_OK | os.W_OK):
        closed.append(control)
    if closed:
        return Probe(
            False, f"no permission to use {closed[0]}", "add the user to the group that owns it (video or render)"
        )
    return Probe(True, f"torch for CUDA {cuda}, and {len(usable)} {'GPU' if len(usable) == 1 else 'GPUs'}")


def _describe(build: TorchBuild) -> str:
    names = {"rocm": "ROCm", "hip": "ROCm", "xpu": "XPU"}
    platform = next((names[name] for name in names if name in build.platforms), "the CPU only")
    return f"the installed torch {build.version or 'of an unknown version'} is a build for {platform}"


def loadable(environ: Mapping[str, str] = os.environ, cache: Path = CACHE) -> bool:
    """Return whether the loader finds NVIDIA's library. It is loaded only if no known folder has it."""
    if any((folder / LIBRARY).exists() for folder in _folders(environ, cache)):
        return True
    try:
        ctypes.CDLL(LIBRARY)  # does not initialize CUDA
    except OSError:
        return False
    return True


def _folders(environ: Mapping[str, str], cache: Path) -> Iterator[Path]:
    yield from (Path(each) for each in environ.get("LD_LIBRARY_PATH", "").split(":") if each)
    if cache.exists():
        for name in re.findall(rb"[^\0]*/" + re.escape(LIBRARY.encode()) + rb"(?=\0)", cache.read_bytes()):
            yield Path(os.fsdecode(name)).parent
    yield from map(Path, FOLDERS)
