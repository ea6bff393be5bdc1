"""Checks of a device's kernels against the references of their operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hal.ops import Draw, Operation, Sample
from hal.ops.tolerance import assert_agree


def draw_on(device: str, operation: Operation, dtype: torch.dtype, seed: int) -> Iterator[Sample]:
    """Yield the operation's samples on a device, with host arguments on the host."""
    for sample in operation.samples(Draw(dtype, device, seed)):
        names = zip(operation.signature.parameters, sample, strict=True)
        yield tuple(value.cpu() if name in operation.host else value for name, value in names)


def on_cpu(values: Any) -> Any:
    """Return copies of a sample's tensors on the CPU."""
    return tuple(value.to("cpu", copy=True) if isinstance(value, Tensor) else value for value in values)


def check_kernel(
    operation: Operation, dtype: torch.dtype, kernel: Callable[..., Any], sample: Sample, what: str = ""
) -> None:
    """Check results and mutated arguments; other arguments must not change. Elements may be NaN where none is read."""
    before, reference = on_cpu(sample), on_cpu(sample)
    with torch.inference_mode():
        found, expected = kernel(*sample), operation.reference(*reference)
    assert_agree(operation, dtype, found, expected, what)
    for name, old, new, right in zip(operation.signature.parameters, before, sample, reference, strict=True):
        if name in operation.mutates:
            assert_agree(operation, dtype, new, right, f"{what}: {name}")
        elif isinstance(old, Tensor):
            assert torch.equal(new.cpu().nan_to_num(), old.nan_to_num()), f"{operation.name} wrote {name} ({what})"
