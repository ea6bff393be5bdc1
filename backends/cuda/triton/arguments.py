"""Checks and strides of tensors for a launch."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.errors import OperationError

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)


def require(fits: bool, operation: str, *tensors: Tensor) -> None:
    """Check the arguments of a kernel, which would otherwise read out of bounds.

    Raises:
        OperationError: ``fits`` is false, the first tensor is not floating-point, or the devices differ.
    """
    first = tensors[0]
    if fits and first.dtype in FLOATING and all(tensor.device == first.device for tensor in tensors):
        return
    found = ", ".join(
        f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}" for tensor in tensors
    )
    raise OperationError(
        f"{operation} was given {found}",
        "give float32, bfloat16 or float16 tensors on one device, of the shapes in the operation's documentation",
    )


def rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Return ``x`` with unit stride in its last dimension, copied if necessary, and the strides of its rows.

    With these strides, kernels read heads in a packed projection, ``[tokens, heads, head_dim]``, in place.

    Returns:
        x; the number of rows per group; the stride between groups, in elements; the stride between rows.
    """
    if x.stride(-1) != 1 or x.dim() not in (2, 3):
        x = x.contiguous()
    if x.dim() == 3:
        return x, x.shape[1], x.stride(0), x.stride(1)
    return x, 1, x.stride(0) if x.dim() == 2 else x.shape[-1], 0


def unit_stride(x: Tensor) -> Tensor:
    """Return ``x``, copied if the stride of its last dimension is not 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def warps(elements: int) -> int:
    """Return the number of warps for a tile of ``elements``: 16 elements per thread, up to 16 warps."""
    return min(max(elements // 512, 1), 16)
