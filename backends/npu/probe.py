"""Whether the driver can run here, found out without importing torch_npu or touching an NPU."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from hal.driver import Probe

DEVICES = Path("/dev")
MANAGER = "davinci_manager"
"""The device file that CANN opens first; the NPUs themselves are davinci0, davinci1 and so on."""
INSTALL = "pip install torch-npu, in the release that fits the installed torch (torch-npu 2.13.0 for torch 2.13)"
EMULATE = "or run on an emulated NPU: the option emulator, --emulate on the command line, or HAL_NPU_EMULATOR=1"


def probe(environ: Mapping[str, str] = os.environ, devices: Path = DEVICES) -> Probe:
    """What is there of torch_npu, CANN, an NPU, and the permission to use it; the first that is missing is named."""
    from .emulator.activation import is_active, real_cann

    if importlib.util.find_spec("torch_npu") is None:
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
            f"install the Ascend driver, and in a container pass the devices in; {EMULATE}",
        )
    closed = [
        each for each in (*npus[:1], devices / MANAGER) if each.exists() and not os.access(each, os.R_OK | os.W_OK)
    ]
    if closed:
        return Probe(
            False,
            f"no permission to use {closed[0]}",
            "add the user to the group that owns it (HwHiAiUser), or run as one who may",
        )
    return Probe(True, f"CANN and {len(npus)} NPUs")


def probe_emulated() -> Probe:
    """Whether an emulated NPU can be expected to open."""
    from .emulator.activation import is_active

    if importlib.util.find_spec("torch_npu") is None:
        return Probe(False, "torch_npu is not installed, which the emulated NPU runs under", INSTALL)
    if not is_active() and shutil.which("g++") is None:
        return Probe(False, "there is no g++, which compiles the emulated CANN", "install g++, 11 or later")
    return Probe(True, "an emulated NPU")
