"""Tracing of functions to graphs of overloads, by one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

TRACING = threading.RLock()
"""Held while torch traces: tracing uses variables of the process and changes ``nn.Module``.

Code that holds it must not wait for another thread that traces. It does not: a function from ``torch.compile`` rejects
being traced. A thread that holds Dynamo's lock can therefore acquire this one.
"""


def make_graph(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    mode: FakeTensorMode,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> fx.GraphModule:
    """Return the overloads that ``function(*inputs)`` calls as a graph, whose placeholders are the inputs in order.

    Other tensors become attributes of the graph's module.
    """
    made = make_fx(function, decomposition_table=decompositions, _allow_non_fake_inputs=True)
    allowed, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True  # Modes of Dynamo do not allow them.
    try:
        with TRACING, torch.inference_mode(False), torch.no_grad(), mode:
            return made(*inputs)
    finally:
        mode.allow_non_fake_inputs = allowed
