"""hal: a hardware abstraction layer for running language models on PyTorch.

Model authors code against :mod:`hal.ops` and :mod:`hal.nn`, vendors subclass :class:`hal.Driver`, and engines call
:func:`hal.open`, :func:`hal.load_model` and :class:`hal.Runner`. Names load when they are first used.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from hal.version import API_VERSION, __version__

if "torch" not in sys.modules and "TORCH_DEVICE_BACKEND_AUTOLOAD" not in os.environ:
    # `import torch` imports every vendor package it finds, and fails if one of them does. A driver imports its own when
    # it is opened, so torch is imported without them; the variable is restored for whoever comes after.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    try:
        import torch as _torch  # noqa: F401
    except (ImportError, OSError):
        pass  # Whatever uses torch meets the error when it imports it; `hal doctor` does not, and tells of it.
    finally:
        del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]

if TYPE_CHECKING:
    from hal import nn, ops
    from hal.backend import Backend, active_backend
    from hal.checkpoint.checkpoint import Checkpoint
    from hal.checkpoint.loading import load_model
    from hal.config import CacheConfig, CompilationConfig, Config, PhaseConfig
    from hal.device import Device
    from hal.driver import Driver, Probe
    from hal.drivers.compiler import Compiler, Form
    from hal.errors import HalError
    from hal.execution.runner import Runner, StepOutput
    from hal.graph import Graph
    from hal.host import HostDevice
    from hal.limits import Limits
    from hal.memory import MemoryStats
    from hal.registry import open_backend as open  # noqa: A004 - hal.open reads well, and nobody imports * here
    from hal.runtime.generate import Token, generate
    from hal.runtime.sampling import SamplingParams
    from hal.step import Batch, State, StateMemory, StateSpec, StepShape
    from hal.stream import Event, Stream

_HOME = {
    "Backend": "hal.backend",
    "Batch": "hal.step",
    "CacheConfig": "hal.config",
    "Checkpoint": "hal.checkpoint.checkpoint",
    "CompilationConfig": "hal.config",
    "Compiler": "hal.drivers.compiler",
    "Config": "hal.config",
    "Device": "hal.device",
    "Driver": "hal.driver",
    "Event": "hal.stream",
    "Form": "hal.drivers.compiler",
    "Graph": "hal.graph",
    "HostDevice": "hal.host",
    "HalError": "hal.errors",
    "Limits": "hal.limits",
    "MemoryStats": "hal.memory",
    "Probe": "hal.driver",
    "PhaseConfig": "hal.config",
    "Runner": "hal.execution.runner",
    "SamplingParams": "hal.runtime.sampling",
    "State": "hal.step",
    "StateMemory": "hal.step",
    "StateSpec": "hal.step",
    "StepOutput": "hal.execution.runner",
    "StepShape": "hal.step",
    "Stream": "hal.stream",
    "Token": "hal.runtime.generate",
    "active_backend": "hal.backend",
    "generate": "hal.runtime.generate",
    "load_model": "hal.checkpoint.loading",
    "open": "hal.registry:open_backend",
}
_MODULES = ("nn", "ops")

__all__ = [
    "API_VERSION",
    "Backend",
    "Batch",
    "CacheConfig",
    "Checkpoint",
    "CompilationConfig",
    "Compiler",
    "Config",
    "Device",
    "Driver",
    "Event",
    "Form",
    "Graph",
    "HalError",
    "HostDevice",
    "Limits",
    "MemoryStats",
    "PhaseConfig",
    "Probe",
    "Runner",
    "SamplingParams",
    "State",
    "StateMemory",
    "StateSpec",
    "StepOutput",
    "StepShape",
    "Stream",
    "Token",
    "__version__",
    "active_backend",
    "generate",
    "load_model",
    "nn",
    "open",
    "ops",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"hal.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'hal' has no attribute {name!r}")
    module, _, attribute = _HOME[name].partition(":")
    value = getattr(importlib.import_module(module), attribute or name)
    globals()[name] = value
    return value
