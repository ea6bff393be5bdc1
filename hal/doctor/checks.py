"""The checks of a device: a few of the conformance suite's, which together take seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from hal import ops
from hal.drivers.backend import Backend
from hal.nn import WeightUse
from hal.ops import Draw
from hal.testing.case import NotApplicable
from hal.testing.graphs.graph_cases import inputs_in_place
from hal.testing.graphs.host_value_cases import lengths_change
from hal.testing.models.paged_attention import Paged
from hal.testing.operations.calls import Call
from hal.testing.operations.check_operation import check_call

OPERATIONS = ("embedding", "linear", "rms_norm", "rotary_embedding", "silu_and_mul", "greedy_sample")
"""The operations of a decoder step except attention; the conformance suite checks all operations."""
SAMPLES = 2
SIZE = 64
PROJECTION = 512, 640
"""Sizes of a weight that drivers bring into their own layout: the CPU's leaves small ones as they are."""
HEAD_DIM = 128


def checks(backend: Backend) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield names and check functions, which return a description of their work.

    A check raises AssertionError if a result is wrong, and NotApplicable if it does not apply. ``backend`` must be
    active.
    """
    yield "matmul", partial(_matmul, backend)
    yield "projection", partial(_projection, backend)
    for name in OPERATIONS:
        yield name, partial(_operation, backend, name)
    yield "attention", partial(_attention, backend)
    yield "graph", partial(_graph, backend)


def _matmul(backend: Backend) -> str:
    for dtype in backend.limits.dtypes:
        draw = Draw(dtype)
        # With values -1, 0 and 1 every dtype represents every sum exactly.
        left, right = (draw.integers(-1, 2, SIZE, SIZE).to(dtype) for _ in range(2))
        found = left.to(backend.device.torch) @ right.to(backend.device.torch)
        torch.testing.assert_close(found.cpu(), (left.float() @ right.float()).to(dtype), rtol=0, atol=0)
    return f"{SIZE} x {SIZE}, {_names(backend.limits.dtypes)}"


def _projection(backend: Backend) -> str:
    for dtype in backend.limits.dtypes:
        draw = Draw(dtype)
        x, weight = (draw.integers(-1, 2, rows, PROJECTION[1]).to(dtype) for rows in (2, PROJECTION[0]))
        held = backend.prepare_weights({"weight": weight.to(backend.device.torch)}, WeightUse("linear", dtype))
        found = backend.ops.linear(x.to(backend.device.torch), held["weight"])
        torch.testing.assert_close(found.cpu(), (x.float() @ weight.float().t()).to(dtype), rtol=0, atol=0)
    return f"prepared weights of {PROJECTION[0]} x {PROJECTION[1]}, {_names(backend.limits.dtypes)}"


def _operation(backend: Backend, name: str) -> str:
    operation = ops.operation(name)
    for dtype in backend.limits.dtypes:
        for number in range(SAMPLES):
            check_call(backend, Call(operation, dtype, number, f"sample-{number}"), operation.function)
    kind = "kernel" if name in backend.kernels else "reference"
    return f"{kind}, {_names(backend.limits.dtypes)}"


def _attention(backend: Backend) -> str:
    dims, size = backend.limits.head_dims, backend.block_size
    head_dim, lengths = HEAD_DIM if not dims or HEAD_DIM in dims else dims[0], [size + 1, 1]
    for dtype in backend.limits.dtypes:
        Paged.filled(backend, dtype, size, head_dim, lengths).check([1, 1], lengths)
    return f"blocks of {size}, {_names(backend.limits.dtypes)}"


def _graph(backend: Backend) -> str:
    if "graph" not in backend.compilers:
        raise NotApplicable("the backend does not support graphs")
    inputs_in_place(backend)
    lengths_change(backend)
    return "captured, and replayed with new inputs and lengths"


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(each).removeprefix("torch.") for each in dtypes)
