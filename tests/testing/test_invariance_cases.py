"""Kernels that are declared invariant and are not: the conformance suite finds each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hal import ops
from hal.config import read
from hal.config.settings import Config
from hal.device.host_device import HostDevice
from hal.drivers.backend import Backend
from hal.ops.kernels.kernel_table import Kernel
from hal.testing.case import Failure
from hal.testing.invariance_cases import check_invariant
from hal.testing.operation_calls import Call, largest_sample

OTHERWISE = 1 + 2e-7
"""The factor of a result that was rounded otherwise."""


def reference(name: str) -> Kernel:
    return ops.operation(name).reference


def by_rows(name: str, most: int = 3) -> Kernel:
    """Return a kernel that computes otherwise for more rows: as a library that chooses by their number."""

    def run(x: Tensor, *rest: Any) -> Any:
        found = reference(name)(x, *rest)
        return found if x.shape[0] <= most else found * OTHERWISE

    return run


def other_last_row(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Round the last row once more: as code for what is left after whole vectors."""
    found: Tensor = reference("rms_norm")(x, weight, eps)
    found[-1:] = found[-1:] * OTHERWISE
    return found


def by_batch(query: Tensor, *rest: Any) -> Any:
    """Split the keys of attention by the number of sequences."""
    found = reference("paged_attention")(query, *rest)
    return found if rest[2].shape[0] == 1 else found * OTHERWISE


def by_chunk(query: Tensor, *rest: Any) -> Any:
    """Attend otherwise with several new tokens of a sequence."""
    several = bool((rest[3].diff() > 1).any())
    found = reference("paged_attention")(query, *rest)
    return found * OTHERWISE if several else found


def by_chunk_of_state(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor, *rest: Any
) -> Any:
    """Round the state after each call."""
    found = reference("gated_delta_rule")(query, key, value, decay, beta, state, *rest)
    state.copy_(state.bfloat16())
    return found


def fused_otherwise(x: Tensor, residual: Tensor, *rest: Any) -> Any:
    """Normalize the sum otherwise than rms_norm does."""
    y, hidden = reference("add_rms_norm")(x, residual, *rest)
    return y * OTHERWISE, hidden


def by_expert(x: Tensor, weight: Tensor, counts: Tensor, *rest: Any) -> Any:
    """Multiply otherwise for an expert with more rows."""
    found = reference("grouped_linear")(x, weight, counts, *rest)
    return found * OTHERWISE if int(counts.max()) > 2 else found


PLANTED: list[tuple[str, Callable[..., Any]]] = [
    ("linear", by_rows("linear")),
    ("layer_norm", by_rows("layer_norm")),
    ("rms_norm", other_last_row),
    ("paged_attention", by_batch),
    ("paged_attention", by_chunk),
    ("gated_delta_rule", by_chunk_of_state),
    ("add_rms_norm", fused_otherwise),
    ("grouped_linear", by_expert),
]


@pytest.mark.parametrize(("name", "kernel"), PLANTED, ids=lambda each: getattr(each, "__name__", each))
def test_a_planted_violation_is_found(name: str, kernel: Kernel) -> None:
    operation = ops.operation(name)
    call = Call(operation, torch.float32, largest_sample(operation), "")
    alone = {"rms_norm": reference("rms_norm")} if operation.fused else {}
    backend = Backend("planted", HostDevice(), kernels={name: kernel}, invariant={**alone, name: kernel})
    backend.configure(read(Config, {"backend": "planted", "numerics": {"invariant": True}}))
    backend.activate()
    with pytest.raises(Failure, match="other bits"):
        check_invariant(backend, call)
