"""Fake implementations: the results of an operation for fake tensors, as in a trace.

The reference implementation computes them. It takes milliseconds, and the layers of a model repeat the same calls, so
results are cached by the metadata of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

Kernel = Callable[..., Any]

_known: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
"""Results by the metadata of arguments, by fake mode, because symbolic sizes belong to one trace."""


def cached_fake(fake: Kernel) -> Kernel:
    """Cache ``fake`` by the metadata of its arguments. Its outputs are contiguous, and alias nothing."""

    def remembered(*args: Any, **kwargs: Any) -> Any:
        mode = next((each.fake_mode for each in args if hasattr(each, "fake_mode")), None)
        if mode is None:
            return fake(*args, **kwargs)
        known = _known.setdefault(mode, {})
        key = (fake, tuple(map(_look, args)), tuple((name, _look(each)) for name, each in kwargs.items()))
        if key not in known:
            # Conditions of the reference on sizes must not become guards: a kernel has none.
            with nullcontext() if mode.shape_env is None else mode.shape_env.suppress_guards():
                known[key] = _described(fake(*args, **kwargs))
        return _made(known[key])

    return remembered


def _look(value: Any) -> Any:
    """Return the metadata of an argument that outputs can depend on."""
    if isinstance(value, Tensor):
        layout = value.layout
        strides = tuple(map(str, value.stride())) if layout is torch.strided else ()
        return tuple(map(str, value.shape)), strides, value.dtype, value.device, layout
    return type(value), str(value)


def _described(result: Any) -> Any:
    if isinstance(result, Tensor):
        return tuple(result.shape), result.dtype, result.device
    return None if result is None else [_described(each) for each in result]


def _made(description: Any) -> Any:
    if isinstance(description, list):
        return tuple(_made(each) for each in description)
    if description is None:
        return None
    shape, dtype, device = description
    return torch.empty(shape, dtype=dtype, device=device)
