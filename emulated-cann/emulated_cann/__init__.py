"""An emulated CANN, on which the unmodified torch_npu runs on a CPU.

ninja_build.py compiles src/, and build.py caches the libraries in library_cache.py's folders. symbols.py generates
stubs for functions that are not emulated. activation.py makes torch_npu load the libraries, options.py reads the
machine's options, tracing.py traces launches, race_reports.py finds races, control.py injects faults, python_launch.py
launches kernels that are written in Python, and command.py is ``emulated-cann``.

This file imports nothing: `import torch` imports the package, to see whether it is to be activated.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .activation import activate, activate_from_environment, installed_canns, is_active, is_emulated
    from .build import compiler
    from .control import Fault, faults, limits, live_handles, memory_in_use, schedule, seed
    from .errors import EmulationError, InvalidOption, Unavailable
    from .options import Options
    from .python_launch import launch
    from .race_reports import Race, races
    from .tracing import Operand, Record, Trace, trace

_HOME = {
    **dict.fromkeys(
        ("activate", "activate_from_environment", "installed_canns", "is_active", "is_emulated"), ".activation"
    ),
    **dict.fromkeys(("EmulationError", "InvalidOption", "Unavailable"), ".errors"),
    **dict.fromkeys(("Fault", "faults", "limits", "live_handles", "memory_in_use", "schedule", "seed"), ".control"),
    **dict.fromkeys(("Race", "races"), ".race_reports"),
    **dict.fromkeys(("Operand", "Record", "Trace", "trace"), ".tracing"),
    "Options": ".options",
    "compiler": ".build",
    "launch": ".python_launch",
}
"""The modules that define the public names."""

__all__ = [
    "EmulationError",
    "Fault",
    "InvalidOption",
    "Operand",
    "Options",
    "Race",
    "Record",
    "Trace",
    "Unavailable",
    "activate",
    "activate_from_environment",
    "compiler",
    "faults",
    "installed_canns",
    "is_active",
    "is_emulated",
    "launch",
    "limits",
    "live_handles",
    "memory_in_use",
    "races",
    "schedule",
    "seed",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name], __name__), name)
    return value
