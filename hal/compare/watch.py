"""Hooks on a model that report which module calls an operation, and the outputs of the numbered layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from hal import ops
from hal.compare.comparison_results import OUTSIDE, Call
from hal.ops import Operation
from hal.ops.rounding import Disturbance

_LAYER = re.compile(r"(?:[A-Za-z_]\w*\.)*\d+(?=\.|$)")

Seen = Callable[[Call, Operation, Callable[..., Any], tuple[Any, ...]], Any]
"""Called with a call, its operation, the active backend's kernel and the arguments by position; returns the result."""


def layer_of(path: str) -> str:
    """Return the outermost numbered layer in a module's path, or :data:`OUTSIDE`."""
    found = _LAYER.match(path)
    return found.group() if found else OUTSIDE


class ModelWatch:
    """Follows a model's forward by hooks on its modules.

    Attributes:
        layers: outputs of the numbered layers in the last step, by path, in float32 on the CPU.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._stack = [type(model).__name__]
        self._inside = False
        self._number = 0
        self._step = 0
        self._given: dict[str, list[Tensor]] = {}

    @contextmanager
    def step(self, step: int, seen: Seen) -> Iterator[None]:
        """Pass every call of an operation by the model to ``seen`` inside the block, except calls made by kernels."""
        self._step, self._number, self._given = step, 0, {}
        handles = []
        for path, module in self._model.named_modules():
            if path:
                handles.append(module.register_forward_pre_hook(self._entering(path)))
                handles.append(module.register_forward_hook(self._leaving(path), always_call=True))
        try:
            with ops.intercepted(lambda operation, kernel: self._intercept(operation, kernel, seen)):
                yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def layers(self) -> dict[str, Tensor]:
        return {path: torch.cat(parts) for path, parts in self._given.items()}

    def _intercept(self, operation: Operation, kernel: Callable[..., Any], seen: Seen) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            if self._inside:
                return kernel(*args)
            path = self._stack[-1]
            call = Call(self._step, self._number, operation.name, path, layer_of(path))
            self._inside = True
            try:
                return seen(call, operation, kernel, args)
            finally:
                self._inside = False
                self._number += 1

        return watched

    def _entering(self, path: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._stack.append(path)

        return enter

    def _leaving(self, path: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._stack.pop()
            given = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
            if layer_of(path) == path and given is not None:  # None if the module raised
                self._given.setdefault(path, []).append(given.float().cpu())

        return leave


def disturbing(dtype: torch.dtype) -> Seen:
    """Return what runs each kernel and moves its results by about one rounding of ``dtype``."""
    disturbance = Disturbance(dtype)
    return lambda call, operation, kernel, args: tree_map_only(Tensor, disturbance.moved, kernel(*args))
