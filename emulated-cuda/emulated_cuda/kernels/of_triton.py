"""Runs Triton kernels in Triton's interpreter, on the current stream.

By default the interpreter copies tensors to the host and back when a kernel is launched. This waits for the device, and
cannot be captured.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from .stream import launch, on_cpu


def register(interpreter: ModuleType) -> None:
    """Make the interpreter queue launches of kernels on the device."""
    executor = interpreter.GridExecutor
    run_now = executor.__call__

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        values = (*args, *kwargs.values())
        if not any(isinstance(each, torch.Tensor) and each.is_cuda for each in values):
            run_now(self, *args, **kwargs)
            return
        args = tuple(_aliased(each) for each in args)
        kwargs = {name: _aliased(each) for name, each in kwargs.items()}
        launch(self.fn.__name__, lambda: run_now(self, *args, **kwargs))

    executor.__call__ = run


def _aliased(value: Any) -> Any:
    return on_cpu(value) if isinstance(value, torch.Tensor) and value.is_cuda else value
