"""An emulated CANN, on which the unmodified torch_npu runs on a CPU.

ninja_build.py compiles src/, and build.py caches the libraries. symbols.py generates stubs for functions that are not
emulated. activation.py makes torch_npu load the libraries, tracing.py traces launches, control.py injects faults, and
command.py is ``hal emulate``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .activation import Options, activate, activate_from_environment, is_active
    from .control import Fault, faults, limits, live_handles, memory_in_use, schedule, seed
    from .tracing import Operand, Record, Trace, trace

__all__ = [
    "Fault",
    "Operand",
    "Options",
    "Record",
    "Trace",
    "activate",
    "activate_from_environment",
    "faults",
    "is_active",
    "limits",
    "live_handles",
    "memory_in_use",
    "schedule",
    "seed",
    "trace",
]

_HOME = {
    **dict.fromkeys(("Options", "activate", "activate_from_environment", "is_active"), ".activation"),
    **dict.fromkeys(("Operand", "Record", "Trace", "trace"), ".tracing"),
}
"""The modules that define the names; the other names are in control.py."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_HOME.get(name, ".control"), __name__)
    value = globals()[name] = getattr(module, name)
    return value
