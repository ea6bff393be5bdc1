"""An emulated CANN, under which the unmodified torch_npu runs on a CPU.

build.py keeps what ninja_build.py compiles from src/, symbols.py writes stubs that refuse what is not emulated,
activation.py puts the libraries under torch_npu, control.py traces launches and injects faults, command.py is ``hal
emulate``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .activation import Options, activate, activate_from_environment, is_active
    from .control import (
        Fault,
        Operand,
        Record,
        Trace,
        faults,
        limits,
        live_handles,
        memory_in_use,
        schedule,
        seed,
        trace,
    )

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

_OF_ACTIVATION = ("Options", "activate", "activate_from_environment", "is_active")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(".activation" if name in _OF_ACTIVATION else ".control", __name__)
    value = globals()[name] = getattr(module, name)
    return value
