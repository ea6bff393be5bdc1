"""Checks and strides of tensors for a launch."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.errors import OperationError
from hal.ops.forms import Form

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)


def require(fits: bool, operation: str, *tensors: Tensor, dtype: torch.dtype | None = None) -> None:
    """Check the arguments of a kernel, which would otherwise read out of bounds.

    Raises:
        OperationError: ``fits`` is false, ``dtype``, which is that of the first tensor if None, is not a floating-point
            one, or the devices differ.
    """
    first = tensors[0]
    if fits and (dtype or first.dtype) in FLOATING and all(tensor.device == first.device for tensor in tensors):
        return
    found = ", ".join(
        f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}" for tensor in tensors
    )
    raise OperationError(
        f"{operation} was given {found}",
        "give float32, bfloat16 or float16 tensors on one device, of the shapes in the operation's documentation",
    )


def require_form(
    operation: str,
    form: Form,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    zero_point: Tensor | None,
    x_scale: Tensor | None,
    dtype: torch.dtype | None,
    counts: Tensor | None = None,
) -> None:
    """Check the arguments of a projection with a weight in another form than floating-point numbers.

    Raises:
        OperationError: they do not match the form, or one another.
    """
    fits = weight.dim() == 2 if counts is None else weight.dim() == 3 and x.dim() == 2
    if counts is not None:
        fits = fits and len(weight) > 0 and counts.shape == weight.shape[:1] and counts.dtype is torch.int64
    if fits:
        *leading, out_features, _ = weight.shape
        width = form.width(weight)
        fits = x.shape[-1] == width and x.is_floating_point() == form.inputs.endswith(("float", "float8"))
        fits = fits and (x.is_floating_point() or x.dtype is torch.int8) and weight.dtype is form.kind.dtype
        fits = fits and scale.shape == (*leading, *form.scale_shape(out_features, width))
        fits = fits and (scale.is_floating_point() or (scale.dtype is torch.uint8 and form.scales != "float"))
        fits = fits and (zero_point is None or zero_point.shape == scale.shape)
        fits = fits and (bias is None or bias.shape == (*leading, out_features))
        fits = fits and (x_scale is not None) == (form.inputs in ("int8", "float8", "static_float8"))
        fits = fits and (x_scale is None or (x_scale.shape == x.shape[:-1] and x_scale.dtype is torch.float32))
    others = [each for each in (bias, zero_point, x_scale, counts) if each is not None]
    require(fits, f"{operation} of {form}", x, weight, scale, *others, dtype=dtype or x.dtype)


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


def slots(read_slots: Tensor, write_slots: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """Return the slots to read and to write, contiguous, and the number of slots that a sequence writes."""
    read = read_slots.contiguous()
    return (read, read, 1) if write_slots is None else (read, write_slots.contiguous(), write_slots.shape[-1])


def same_sequences(read_slots: Tensor, written: Tensor, saves: int, query_start_loc: Tensor) -> bool:
    """Return whether the slots and starts are int32, and of the same sequences."""
    sequences = read_slots.shape[0]
    fits = read_slots.dim() == 1 and written.numel() == sequences * saves and query_start_loc.shape == (sequences + 1,)
    return fits and all(each.dtype is torch.int32 for each in (read_slots, written, query_start_loc))
