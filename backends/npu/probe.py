"""Detection of torch_npu, CANN and NPUs, without importing torch_npu or opening a device."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from hal.drivers.driver import Probe
from hal.drivers.torch_build import FindSpec

from .torch_build import refused_build

DEVICES = Path("/dev")
MANAGER = "davinci_manager"
"""The device file that CANN opens first; the NPUs themselves are davinci0, davinci1 and so on."""
CONTAINER = "davinci0 and its like, davinci_manager, devmm_svm and hisi_hdc"
INSTALL = (
    "pip install torch-npu in a separate environment with torch's CPU build, in the release for that torch (torch-npu "
    "2.13.0 for torch 2.13); in a checkout, `make demo` makes .venv/npu"
)
EMULATE = "or run on an emulated NPU: set the driver option emulator, pass --emulate, or set HAL_NPU_EMULATOR=1"


def probe(
    environ: Mapping[str, str] = os.environ,
    devices: Path = DEVICES,
    find_spec: FindSpec = importlib.util.find_spec,
    access: Callable[[Path, int], bool] = os.access,
) -> Probe:
    """Check for torch_npu, a build of torch that fits it, CANN, an NPU and access to it; report the first failure."""
    from .emulator.activation import is_active, real_cann

    if find_spec("torch_npu") is None:
        return Probe(False, "torch_npu is not installed", f"{INSTALL}; {EMULATE}")
    if (refused := refused_build(find_spec)) is not None:
        return refused
    if is_active():
        return Probe(True, "the emulated CANN is active")
    if next(real_cann(environ), None) is None:
        return Probe(
            False,
            "torch_npu is installed, but no CANN: libascendcl.so was not found",
            f"install CANN and source its set_env.sh; {EMULATE}",
        )
    npus = sorted(each for each in devices.glob("davinci[0-9]*") if each.name[7:].isdigit())
    if not npus:
        return Probe(
            False,
            f"CANN is installed, but no NPU was found: {devices}/davinci0 does not exist",
            f"install the Ascend driver; in a container, pass the devices {CONTAINER}; {EMULATE}",
        )
    usable = [each for each in npus if access(each, os.R_OK | os.W_OK)]
    manager = devices / MANAGER
    closed = [] if usable else npus[:1]
    if manager.exists() and not access(manager, os.R_OK | os.W_OK):
        closed.append(manager)
    if closed:
        return Probe(
            False,
            f"no permission to use {closed[0]}",
            f"add the user to the group that owns it (HwHiAiUser); {EMULATE}",
        )
    return Probe(True, f"CANN and {len(usable)} {'NPU' if len(usable) == 1 else 'NPUs'}")


def probe_emulated(
    find_spec: FindSpec = importlib.util.find_spec, which: Callable[[str], str | None] = shutil.which
) -> Probe:
    """Check for the prerequisites of an emulated NPU."""
    from .emulator.activation import is_active

    if find_spec("torch_npu") is None:
        return Probe(False, "torch_npu is not installed, and the emulated NPU requires it", INSTALL)
    if (refused := refused_build(find_spec)) is not None:
        return refused
    if not is_active() and which("g++") is None:
        return Probe(False, "the emulated CANN requires g++, which is not on the PATH", "install g++ 11 or later")
    return Probe(True, "an emulated NPU")
