"""hal: a hardware abstraction layer for running language models on PyTorch.

Model authors use :mod:`hal.ops` and :mod:`hal.nn`, vendors subclass :class:`hal.Driver`, and engines call
:func:`hal.open`, :func:`hal.load_model` and :class:`hal.Runner`. Names are imported on first use.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from hal.version import API_VERSION, __version__

_parent = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if not os.path.exists(os.path.join(__path__[0], "backends")) and os.path.exists(os.path.join(_parent, "backends")):
    # A checkout, where `hal.backends` and `hal.models` are the folders beside this one. Python started in the checkout
    # imports this folder even if hal is installed elsewhere, and must not find half of hal here and half there.
    __path__.append(_parent)

_FOR_TORCH = {
    # `import torch` imports every installed vendor package, and fails if one of them does. Drivers import their own
    # when they are opened.
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    # Threads of torch's libgomp that wait for others keep their cores for 300,000 turns of a loop, some milliseconds.
    # Where processes share cores, the others then wait for them. 10,000 turns still span what Python runs between two
    # kernels.
    "GOMP_SPINCOUNT": "10000",
}
"""Environment variables with which hal imports torch, where the user sets none. Later code gets the original ones."""

if "torch" not in sys.modules and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "0") == "0":
    _added = {name: text for name, text in _FOR_TORCH.items() if name not in os.environ}
    if "OMP_WAIT_POLICY" in os.environ:
        _added.pop("GOMP_SPINCOUNT", None)
    os.environ.update(_added)
    try:
        import torch as _torch  # noqa: F401
    except (ImportError, OSError):
        pass  # Code that uses torch raises the error when it imports it; `hal doctor` reports it without torch.
    finally:
        for _name in _added:
            del os.environ[_name]

if TYPE_CHECKING:
    from hal import errors, nn, ops, step
    from hal.checkpoint.checkpoint import Checkpoint
    from hal.checkpoint.loading import load_model
    from hal.checkpoint.model_registry import architectures
    from hal.checkpoint.random_weights import RandomCheckpoint
    from hal.config import CacheConfig, CompilationConfig, Config, ParallelConfig, PhaseConfig
    from hal.device.device import Device
    from hal.device.graph import Graph
    from hal.device.host_device import HostDevice
    from hal.device.limits import Limits
    from hal.device.memory import MemoryStats
    from hal.device.stream import Event, Stream
    from hal.drivers.backend import Backend, active_backend
    from hal.drivers.compiler import Compiler, Form
    from hal.drivers.driver import Driver, Probe
    from hal.drivers.registry import open_backend as open  # noqa: A004 - hal.open reads well, and nobody imports * here
    from hal.drivers.registry import read_config
    from hal.errors import HalError
    from hal.execution.host_copy import HostCopy
    from hal.execution.memory_plan import MemoryPlan, plan_memory
    from hal.execution.replace_weights import replace_weights
    from hal.execution.runner import Runner
    from hal.execution.state_spec import state_spec
    from hal.execution.step_output import StepOutput
    from hal.generation.generate import Token, generate
    from hal.generation.sampling_params import SamplingParams
    from hal.step import Batch, State, StateMemory, StateSpec, StepShape

_HOME = {
    "Backend": "hal.drivers.backend",
    "Batch": "hal.step",
    "CacheConfig": "hal.config",
    "Checkpoint": "hal.checkpoint.checkpoint",
    "CompilationConfig": "hal.config",
    "Compiler": "hal.drivers.compiler",
    "Config": "hal.config",
    "Device": "hal.device.device",
    "Driver": "hal.drivers.driver",
    "Event": "hal.device.stream",
    "Form": "hal.drivers.compiler",
    "Graph": "hal.device.graph",
    "HostCopy": "hal.execution.host_copy",
    "HostDevice": "hal.device.host_device",
    "HalError": "hal.errors",
    "Limits": "hal.device.limits",
    "MemoryPlan": "hal.execution.memory_plan",
    "MemoryStats": "hal.device.memory",
    "Probe": "hal.drivers.driver",
    "ParallelConfig": "hal.config",
    "PhaseConfig": "hal.config",
    "RandomCheckpoint": "hal.checkpoint.random_weights",
    "Runner": "hal.execution.runner",
    "SamplingParams": "hal.generation.sampling_params",
    "State": "hal.step",
    "StateMemory": "hal.step",
    "StateSpec": "hal.step",
    "StepOutput": "hal.execution.step_output",
    "StepShape": "hal.step",
    "Stream": "hal.device.stream",
    "Token": "hal.generation.generate",
    "active_backend": "hal.drivers.backend",
    "architectures": "hal.checkpoint.model_registry",
    "generate": "hal.generation.generate",
    "load_model": "hal.checkpoint.loading",
    "open": "hal.drivers.registry:open_backend",
    "plan_memory": "hal.execution.memory_plan",
    "read_config": "hal.drivers.registry",
    "replace_weights": "hal.execution.replace_weights",
    "state_spec": "hal.execution.state_spec",
}
_MODULES = ("errors", "nn", "ops", "step")

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
    "HostCopy",
    "HostDevice",
    "Limits",
    "MemoryPlan",
    "MemoryStats",
    "ParallelConfig",
    "PhaseConfig",
    "Probe",
    "RandomCheckpoint",
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
    "architectures",
    "errors",
    "generate",
    "load_model",
    "nn",
    "open",
    "ops",
    "plan_memory",
    "read_config",
    "replace_weights",
    "state_spec",
    "step",
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
