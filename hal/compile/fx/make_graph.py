"""Functions as graphs of overloads, traced by one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

TRACING = threading.RLock()
"""Held while torch traces: it keeps what it is at in variables of the process, and changes ``nn.Module`` meanwhile.

Inside it nothing may wait for another thread that traces, and nothing does: what ``torch.compile`` made refuses to be
traced. So a thread that holds Dynamo's own lock may take this one.
"""


def make_graph(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    mode: FakeTensorMode,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> fx.GraphModule:
    """The calls of overloads that ``function(*inputs)`` makes, as a graph whose placeholders are the inputs in order.

    Tensors that are no inputs become attributes of its module.

    Args:
        function: of tensors and numbers.
        inputs: fake tensors, and symbolic integers.
        mode: whose fake tensors they are.
        decompositions: by overload, the smaller ones that take its place.
    """
    made = make_fx(function, decomposition_table=decompositions, _allow_non_fake_inputs=True)
    allowed, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True  # which Dynamo's do not
    try:
        with TRACING, torch.inference_mode(False), torch.no_grad(), mode:
            return made(*inputs)
    finally:
        mode.allow_non_fake_inputs = allowed
