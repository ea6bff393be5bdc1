"""hal: a hardware abstraction layer for running language models on PyTorch.

This module is for those who run models: :class:`hal.LLM`, :func:`hal.open`, :func:`hal.load_model`,
:class:`hal.Runner`, :func:`hal.generate`. Model authors use :mod:`hal.ops` and :mod:`hal.nn`, vendors
:mod:`hal.vendor`, and engines :mod:`hal.step`. Names and torch are imported on first use.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from hal import torch_import
from hal.public_names import imported_on_use
from hal.version import API_VERSION, __version__

_parent = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if not os.path.exists(os.path.join(__path__[0], "backends")) and os.path.exists(os.path.join(_parent, "backends")):
    # A checkout, where `hal.backends` and `hal.models` are the folders beside this one. Python started in the checkout
    # imports this folder even if hal is installed elsewhere, and must not find half of hal here and half there.
    __path__.append(_parent)

torch_import.prepare()

if TYPE_CHECKING:
    from hal import errors, nn, ops, step, vendor
    from hal.checkpoint.checkpoint import Checkpoint
    from hal.checkpoint.loading import load_model
    from hal.checkpoint.model_registry import architectures
    from hal.checkpoint.random_weights import RandomCheckpoint
    from hal.config import (
        AdaptersConfig,
        CacheConfig,
        CompilationConfig,
        Config,
        EncoderConfig,
        NumericsConfig,
        ParallelConfig,
        PhaseConfig,
    )
    from hal.drivers.backend import Backend, active_backend
    from hal.drivers.registry import open_backend as open  # noqa: A004 - hal.open reads well, and nobody imports * here
    from hal.drivers.registry import read_config
    from hal.errors import HalError
    from hal.execution.memory_plan import MemoryPlan, plan_memory
    from hal.execution.replace_weights import replace_weights
    from hal.execution.runner import Runner
    from hal.execution.sleep import sleep, wake
    from hal.execution.state_spec import state_spec
    from hal.execution.step_output import HostCopy, StepOutput
    from hal.generation.generate import Piece, generate
    from hal.generation.llm.completion import Completion, Score, TokenLogprob
    from hal.generation.llm.language_model import LLM
    from hal.generation.request import Token
    from hal.generation.sampling_params import SamplingParams

_HOME = {
    "AdaptersConfig": "hal.config",
    "Backend": "hal.drivers.backend",
    "CacheConfig": "hal.config",
    "Checkpoint": "hal.checkpoint.checkpoint",
    "CompilationConfig": "hal.config",
    "EncoderConfig": "hal.config",
    "Completion": "hal.generation.llm.completion",
    "Config": "hal.config",
    "HostCopy": "hal.execution.step_output",
    "HalError": "hal.errors",
    "LLM": "hal.generation.llm.language_model",
    "MemoryPlan": "hal.execution.memory_plan",
    "NumericsConfig": "hal.config",
    "ParallelConfig": "hal.config",
    "PhaseConfig": "hal.config",
    "Piece": "hal.generation.generate",
    "RandomCheckpoint": "hal.checkpoint.random_weights",
    "Runner": "hal.execution.runner",
    "SamplingParams": "hal.generation.sampling_params",
    "Score": "hal.generation.llm.completion",
    "StepOutput": "hal.execution.step_output",
    "TokenLogprob": "hal.generation.llm.completion",
    "Token": "hal.generation.request",
    "active_backend": "hal.drivers.backend",
    "architectures": "hal.checkpoint.model_registry",
    "generate": "hal.generation.generate",
    "load_model": "hal.checkpoint.loading",
    "open": "hal.drivers.registry:open_backend",
    "plan_memory": "hal.execution.memory_plan",
    "read_config": "hal.drivers.registry",
    "replace_weights": "hal.execution.replace_weights",
    "sleep": "hal.execution.sleep",
    "wake": "hal.execution.sleep",
    "state_spec": "hal.execution.state_spec",
}
_MODULES = ("errors", "nn", "ops", "step", "vendor")

__all__ = [
    "API_VERSION",
    "LLM",
    "AdaptersConfig",
    "Backend",
    "CacheConfig",
    "Checkpoint",
    "CompilationConfig",
    "Completion",
    "Config",
    "EncoderConfig",
    "HalError",
    "HostCopy",
    "MemoryPlan",
    "NumericsConfig",
    "ParallelConfig",
    "PhaseConfig",
    "Piece",
    "RandomCheckpoint",
    "Runner",
    "SamplingParams",
    "Score",
    "StepOutput",
    "Token",
    "TokenLogprob",
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
    "sleep",
    "state_spec",
    "step",
    "vendor",
    "wake",
]

_lookup = imported_on_use(__name__, _HOME)


def __getattr__(name: str) -> Any:
    return importlib.import_module(f"hal.{name}") if name in _MODULES else _lookup(name)
