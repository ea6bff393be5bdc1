"""The builds of torch that torch_npu cannot be imported beside.

torch's CUDA and ROCm libraries and torch_npu register the same keys of the allocator's configuration when they are
loaded. The second registration throws during the library's initialization, which aborts the process.
"""

from __future__ import annotations

from importlib.util import find_spec

from hal.drivers.driver import Probe
from hal.drivers.torch_build import FindSpec, installed_torch
from hal.errors import DriverUnavailable

CLASHING = {"cuda": "CUDA", "hip": "ROCm"}
"""Platforms of such builds, by their names in ``torch.version``."""
VERSION = "2.13.0"
"""The version of torch to install where there is none."""


def install_command(version: str | None = None) -> str:
    """Return the command that installs the CPU build of a version of torch, in place of another build of it."""
    release = (version or VERSION).partition("+")[0]
    # Without +cpu, pip keeps an installed build of the same version.
    return f"pip install torch=={release}+cpu --index-url https://download.pytorch.org/whl/cpu"


def refused_build(find_spec: FindSpec = find_spec) -> Probe | None:
    """Return why torch_npu cannot be imported beside the installed torch, without importing either; None if it can."""
    try:
        build = installed_torch(find_spec)
    except OSError:
        return None  # no build of PyTorch's lacks the file
    for name, platform in CLASHING.items():
        if build is not None and name in build.platforms:
            return Probe(
                False,
                f"the installed torch {build.version} is a build for {platform} {build.platforms[name]}, beside which "
                "torch_npu aborts the process",
                f"install torch's CPU build: {install_command(build.version)}",
            )
    return None


def check_build() -> None:
    """Raise :class:`DriverUnavailable` if torch_npu cannot be imported beside the installed torch."""
    refused = refused_build()
    if refused is not None:
        raise DriverUnavailable(refused.reason, refused.hint)
