"""Whether a kernel's results are within the tolerance that its operation declares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from hal.ops.declaration.operation import Operation


def assert_agree(operation: Operation, dtype: torch.dtype, found: Any, expected: Any, what: str = "") -> None:
    """Raise AssertionError unless ``found`` is what the operation may give where its reference gives ``expected``.

    Args:
        operation: whose tolerance holds.
        dtype: that its sample was drawn in.
        found: results, or results and arguments: any nest of tensors, on any device. What is no tensor is not compared.
        expected: the reference's, nested alike, on the CPU.
        what: is said in the message.
    """
    relative, absolute = operation.tolerance[dtype]
    named = " ".join(each for each in (operation.name, what) if each)
    for got, want in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        if not isinstance(want, Tensor):
            continue
        got, share = got.cpu(), operation.off_by_one.get(dtype, 0.0)
        if want.dtype == torch.int8 and share:
            _assert_steps(got, want, share, f"{named}, {dtype}")
        else:
            torch.testing.assert_close(
                got,
                want,
                rtol=relative if want.dtype != torch.int8 else 0,
                atol=absolute if want.dtype != torch.int8 else 0,
                msg=lambda text: f"{named}, {dtype}: {text}",
            )


def _assert_steps(got: Tensor, want: Tensor, share: float, what: str) -> None:
    # Raised by hand, as elsewhere in the checks: `python -O` leaves out assert statements.
    if got.dtype != want.dtype:
        raise AssertionError(f"{what}: {got.dtype} in place of {want.dtype}")
    if got.shape != want.shape:
        raise AssertionError(f"{what}: {list(got.shape)} in place of {list(want.shape)}")
    steps = (got.int() - want.int()).abs()
    off, most = int((steps > 0).sum()), 1 + int(share * steps.numel())
    worst = int(steps.max()) if steps.numel() else 0
    if worst > 1:
        raise AssertionError(f"{what}: int8 results are off by up to {worst}, and 1 is allowed")
    if off > most:
        raise AssertionError(f"{what}: {off} of {steps.numel()} int8 results are off by 1, and {most} may be")
