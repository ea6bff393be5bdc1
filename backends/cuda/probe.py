"""Whether the driver can run here, found out without importing torch or touching a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hal.drivers.driver import Probe

LIBRARY = "libcuda.so.1"
"""What the NVIDIA driver brings, and what torch loads."""
FOLDERS = (
    "/usr/lib/wsl/lib", "/usr/local/nvidia/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64", "/usr/lib",
)  # fmt: skip
"""Where it lies besides what the loader's variable and cache say."""
CACHE = Path("/etc/ld.so.cache")
DEVICES = Path("/dev")
WSL = "dxg"
"""The device file through which the Windows Subsystem for Linux reaches the GPU."""
INSTALL = (
    "pip install torch --index-url https://download.pytorch.org/whl/cu130 (or the cu12x that the GPU's driver takes)"
)

FindSpec = Callable[[str], Any]


def probe(
    environ: Mapping[str, str] = os.environ,
    devices: Path = DEVICES,
    find_spec: FindSpec = importlib.util.find_spec,
    library: Callable[[Mapping[str, str]], bool] | None = None,
    access: Callable[[Path, int], bool] = os.access,
) -> Probe:
    """What is there of a torch for CUDA, NVIDIA's driver, a GPU, and the permission to use it: names the first missing.

    Args:
        environ: the process's environment variables.
        devices: the folder of device files.
        find_spec: finds an importable package.
        library: whether the loader would find NVIDIA's library; None asks :func:`loadable`.
        access: whether a file may be used so.
    """
    spec = find_spec("torch")
    if spec is None or not spec.origin:
        return Probe(False, "torch is not installed", INSTALL)
    cuda, problem = built_for(Path(spec.origin).with_name("version.py"))
    if cuda is None:
        return Probe(False, problem, f"install a build for CUDA: {INSTALL}")
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return Probe(
            False,
            f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides every GPU",
            "unset it, or name the GPUs to use in it",
        )
    if not (library or loadable)(environ):
        return Probe(
            False,
            f"torch is built for CUDA {cuda}, but NVIDIA's driver is not installed: the loader finds no {LIBRARY}",
            "install the NVIDIA driver; in a container, start it with the GPUs (docker run --gpus all)",
        )
    if (devices / WSL).exists():
        return Probe(True, f"torch for CUDA {cuda}, and a GPU that Windows shares")
    gpus = sorted(each for each in devices.glob("nvidia[0-9]*") if each.name[6:].isdigit())
    if not gpus:
        return Probe(
            False,
            f"NVIDIA's driver is installed, but there is no GPU: no {devices}/nvidia0",
            "look at what nvidia-smi says; in a container, start it with the GPUs (docker run --gpus all)",
        )
    usable = [each for each in gpus if access(each, os.R_OK | os.W_OK)]
    control = devices / "nvidiactl"
    closed = [] if usable else gpus[:1]
    if control.exists() and not access(control, os.R_OK | os.W_OK):
        closed.append(control)
    if closed:
        return Probe(False, f"no permission to use {closed[0]}", "join the group that owns it (often video or render)")
    return Probe(True, f"torch for CUDA {cuda}, and {len(usable)} {'GPU' if len(usable) == 1 else 'GPUs'}")


def built_for(file: Path) -> tuple[str | None, str]:
    """The CUDA that a torch is built for, by its ``version.py``; or None and what it is instead."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        return None, f"torch does not say what it is built for: {error}"
    said = dict(re.findall(r"""^(\w+)\s*(?::[^=]*)?=\s*['"]([^'"]*)['"]""", text, re.MULTILINE))
    version = said.get("__version__", "of an unknown version")
    if "cuda" in said:
        return said["cuda"], ""
    other = next(
        (f"for {name.upper() if name == 'xpu' else 'ROCm'}" for name in ("rocm", "hip", "xpu") if name in said), ""
    )
    return None, f"the installed torch {version} is a build {other or 'for the CPU only'}"


def loadable(environ: Mapping[str, str] = os.environ, cache: Path = CACHE) -> bool:
    """Whether the loader finds NVIDIA's library. Only where no usual place has it, the loader itself is asked."""
    if any((folder / LIBRARY).exists() for folder in _folders(environ, cache)):
        return True
    try:
        ctypes.CDLL(LIBRARY)  # which initialises nothing
    except OSError:
        return False
    return True


def _folders(environ: Mapping[str, str], cache: Path) -> Iterator[Path]:
    yield from (Path(each) for each in environ.get("LD_LIBRARY_PATH", "").split(":") if each)
    if cache.exists():
        for name in re.findall(rb"[^\0]*/" + re.escape(LIBRARY.encode()) + rb"(?=\0)", cache.read_bytes()):
            yield Path(os.fsdecode(name)).parent
    yield from map(Path, FOLDERS)
