"""Validation of what a driver's overrides of a backend's methods return."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from torch import Tensor

from hal.device.graph import Graph
from hal.errors import DriverIncompatible, HalError
from hal.step.state import StateMemory, StateSpec


def _memory(memory: Any, spec: StateSpec) -> str:
    if not isinstance(memory, StateMemory):
        return "a hal.step.StateMemory"
    same = [*map(set, memory.layers)] == [*map(set, spec.layers)]
    if same and all(isinstance(each, Tensor) for _, each in memory.tensors()):
        return ""
    return "a hal.step.StateMemory with a tensor for each state of each layer of the spec"


def _same_shape(result: Any, weight: Tensor, *use: Any) -> str:
    if isinstance(result, Tensor) and result.shape == weight.shape:
        return ""
    return f"a tensor of the shape {list(weight.shape)}, which it was given"


def _prepared(result: Any, weights: Mapping[str, Tensor], *use: Any) -> str:
    if isinstance(result, Mapping) and all(isinstance(result.get(each), Tensor) for each in weights):
        return ""
    return f"a mapping with a tensor for each of {', '.join(weights)}, which it was given"


def _instance(kind: type[Any], what: str) -> Callable[..., str]:
    return lambda result, *given: "" if isinstance(result, kind) else what


_RESULTS: Mapping[str, Callable[..., str]] = {
    "graph": _instance(Graph, "a hal.vendor.Graph"),
    "allocate": _memory,
    "prepare_weights": _prepared,
    "plain_weight": _same_shape,
    "explain": lambda result, error: "" if result is None or isinstance(result, HalError) else "a HalError, or None",
    "counting_launches": _instance(AbstractContextManager, "a context manager"),
    "capturing": _instance(AbstractContextManager, "a context manager"),
    "resolve": lambda result, operation: "" if callable(result) else "a callable",
}
"""For each method, a function of its result and arguments: the required result in words, or an empty string."""
HOOKS = frozenset(_RESULTS)
"""The methods whose results are checked. Others return nothing, or are called in every step."""


def checked(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a driver's override of the method ``name`` that raises DriverIncompatible for a wrong result."""
    wrong = _RESULTS[name]

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        bind = getattr(method, "__get__", None)
        bound = method if bind is None else bind(self, type(self))  # a staticmethod takes no self
        result = bound(*args, **kwargs)
        if kwargs:
            given = inspect.signature(bound).bind(*args, **kwargs)
            args, kwargs = given.args, given.kwargs
        if wanted := wrong(result, *args, *kwargs.values()):
            raise DriverIncompatible(
                f"{name} of the driver {self.name} returned {_described(result)}",
                f"report it to the driver's vendor, who must make {type(self).__name__}.{name} return {wanted}",
            )
        return result

    return call


def _described(result: Any) -> str:
    return f"a tensor of the shape {list(result.shape)}" if isinstance(result, Tensor) else reprlib.repr(result)
