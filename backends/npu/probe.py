"""Whether the driver can run here, found out without importing torch_npu or touching an NPU."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hal.drivers.driver import Probe

DEVICES = Path("/dev")
MANAGER = "davinci_manager"
"""The device file that CANN opens first; the NPUs themselves are davinci0, davinci1 and so on."""
CONTAINER = "davinci0 and its like, davinci_manager, devmm_svm and hisi_hdc"
INSTALL = "pip install torch-npu, in the release that fits the installed torch (torch-npu 2.13.0 for torch 2.13)"
EMULATE = "or run on an emulated NPU: the option emulator, --emulate on the command line, or HAL_NPU_EMULATOR=1"

FindSpec = Callable[[str], Any]


def probe(
    environ: Mapping[str, str] = os.environ,
    devices: Path = DEVICES,
    find_spec: FindSpec = importlib.util.find_spec,
    access: Callable[[Path, int], bool] = os.access,
) -> Probe:
    """What is there of torch_npu, CANN, an NPU, and the permission to use it; the first that is missing is named."""
    from .emulator.activation import is_active, real_cann

    if find_spec("torch_npu") is None:
        return Probe(False, "torch_npu is not installed", f"{INSTALL}; {EMULATE}")
    if is_active():
        return Probe(True, "the emulated CANN is active")
    if next(real_cann(environ), None) is None:
        return Probe(
            False,
            "torch_npu is installed, but no CANN: nothing leads to a libascendcl.so",
            f"install CANN and source its set_env.sh; {EMULATE}",
        )
    npus = sorted(each for each in devices.glob("davinci[0-9]*") if each.name[7:].isdigit())
    if not npus:
        return Probe(
            False,
            f"CANN is installed, but there is no NPU: no {devices}/davinci0",
            f"install the Ascend driver, and in a container pass the devices in ({CONTAINER}); {EMULATE}",
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
            f"add the user to the group that owns it (HwHiAiUser), or run as one who may; {EMULATE}",
        )
    return Probe(True, f"CANN and {len(usable)} {'NPU' if len(usable) == 1 else 'NPUs'}")


def probe_emulated(
    find_spec: FindSpec = importlib.util.find_spec, which: Callable[[str], str | None] = shutil.which
) -> Probe:
    """Whether an emulated NPU can be expected to open."""
    from .emulator.activation import is_active

    if find_spec("torch_npu") is None:
        return Probe(False, "torch_npu is not installed, which the emulated NPU runs under", INSTALL)
    if not is_active() and which("g++") is None:
        return Probe(False, "there is no g++, which compiles the emulated CANN", "install g++, 11 or later")
    return Probe(True, "an emulated NPU")
