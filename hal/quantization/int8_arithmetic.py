"""The arithmetic of int8 layers: quantization of weights, and scales of activations."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from hal.errors import CheckpointError

INT32_MAX = 2**31 - 1
AGAIN = "the checkpoint is damaged: quantize or download it again"


@attrs.frozen(eq=False)
class Activation:
    """The quantization of a layer's input to int8: ``round(x / scale) + offset``, clamped to -128 and 127."""

    scale: float
    offset: int = 0


def quantize_weight(name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize ``[rows, columns]`` symmetrically per row: ``scale = max|row| / 127``; half rounds to even.

    Returns:
        int8 of the same shape, and the scales, float32 ``[rows]``. A row of zeros has the scale 1.

    Raises:
        CheckpointError: a value is NaN or infinite.
    """
    wide = weight.float()
    largest = wide.abs().amax(-1)
    if not bool(largest.isfinite().all()):
        raise CheckpointError(f"{name} has values that are not finite", "use a checkpoint with finite weights")
    scale = torch.where(largest == 0, 1.0, largest / 127)
    return (wide / scale.unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8), scale


def activation_for(low: float, high: float, *, symmetric: bool, dtype: torch.dtype = torch.float32) -> Activation:
    """Return the quantization of inputs from ``low`` to ``high`` that represents 0 exactly.

    Args:
        low: the smallest observed input.
        high: the largest observed input.
        symmetric: whether the offset is 0.
        dtype: the dtype to store the scale in. The scale is rounded to it here, so that every reader computes the same.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    span = max(-low, high) / 127 if symmetric else (high - low) / 255
    scale = float(torch.tensor(span or 1.0, dtype=torch.float64).to(dtype))
    # The smallest scale that float16 can store; inputs that small quantize to 0 anyway.
    scale = max(scale, torch.finfo(dtype).tiny)
    return Activation(scale, 0 if symmetric else max(-128, min(127, round(-128 - low / scale))))


def bias_counts(bias: Tensor, deq_scale: Tensor) -> Tensor:
    """Return a bias in units of ``deq_scale``, float64 and not rounded."""
    # A row of zero weights may have the scale 0; avoid the division if its bias is 0.
    return torch.where(bias == 0, 0.0, bias.double() / deq_scale.double())


def int8_row_sums(weight: Tensor) -> Tensor:
    """Return the sums of int8 rows ``[..., columns]``, int64 on the CPU. Sums some rows at a time."""
    rows = weight.flatten(0, -2)
    count = max(1, (_SUMMED if weight.device.type == "cpu" else _SUMMED_ON_DEVICE) // max(1, rows.shape[1]))
    sums = [part.sum(-1, dtype=torch.int64) for part in rows.split(count)]
    return torch.cat(sums).cpu().view(weight.shape[:-1])


_SUMMED = 1 << 15
"""Elements per sum: torch widens them first, and large temporaries would fragment the heap."""
_SUMMED_ON_DEVICE = 1 << 22
