"""What kernels need to know of tensors before they are launched: that they fit, and how their rows lie."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.errors import OperationError

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)


def require(fits: bool, operation: str, *tensors: Tensor) -> None:
    """Raise OperationError unless ``fits``, and unless the first of ``tensors`` is floating and all share a device.

    A kernel cannot tell where a tensor ends: what does not fit, it would read past its end.
    """
    first = tensors[0]
    if fits and first.dtype in FLOATING and all(tensor.device == first.device for tensor in tensors):
        return
    found = ", ".join(
        f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}" for tensor in tensors
    )
    raise OperationError(
        f"{operation} was given {found}",
        "give float32, bfloat16 or float16, on one device, of the shapes in the operation's documentation",
    )


def rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """``x`` with unit stride in its last dimension, copied if need be, and how its rows lie.

    Returns:
        x; how many rows are a group; from one group to the next, in elements; from one row to the next. So heads in a
        packed projection, ``[tokens, heads, head_dim]``, are read where they are.
    """
    if x.stride(-1) != 1 or x.dim() not in (2, 3):
        x = x.contiguous()
    if x.dim() == 3:
        return x, x.shape[1], x.stride(0), x.stride(1)
    return x, 1, x.stride(0) if x.dim() == 2 else x.shape[-1], 0


def unit_stride(x: Tensor) -> Tensor:
    """``x``, copied if the elements of its last dimension are not neighbours."""
    return x if x.stride(-1) == 1 else x.contiguous()


def warps(elements: int) -> int:
    """How many warps share a tile of ``elements``: 16 elements for each thread, up to 16 warps."""
    return min(max(elements // 512, 1), 16)
