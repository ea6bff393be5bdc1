"""A description of the machine and software that a benchmark ran on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import hal
from hal.bench.bench_errors import distribution_of
from hal.bench.plan import RIVALS, Setting
from hal.config import environment_options
from hal.device.host_cores import other_running_threads, usable_cores


def environment(setting: Setting) -> dict[str, Any]:
    """Return the machine, the threads, the versions of libraries, and the environment variables that configure hal."""
    libraries = ("torch-hal", "torch", *(distribution_of(RIVALS[name]) for name in setting.plan.against))
    return {
        "device": setting.backend.device.name,
        "backend": setting.backend.name,
        "emulated": _emulated(setting),
        "kernels": dict(setting.backend.sources),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "threads": setting.plan.threads or torch.get_num_threads(),
        "other_threads": other_running_threads(),
        "platform": platform.platform(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith("HAL_")},
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in libraries}},
    }


def _emulated(setting: Setting) -> bool:
    """Return whether the driver's option ``emulator`` is set."""
    options = {**environment_options(setting.backend.name), **setting.backend.config.options}
    return options.get("emulator") not in (None, False, 0, "", "off")


def _version(library: str) -> str:
    if library == "torch":
        return torch.__version__  # with the build, such as +cpu
    return hal.__version__ if library == "torch-hal" else importlib.metadata.version(library)


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
