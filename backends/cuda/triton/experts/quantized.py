"""Products of experts with int8 weights, and their MLPs: W8A8, static and dynamic, and weights only."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.errors import OperationError

from ..arguments import FLOATING, require
from ..quantization import dynamic_quantize, quantize, require_quantizer
from .grouped import project
from .mlp import require_mlp
from .permutation import expert_unpermute, order


def quant_grouped_linear_static(
    x: Tensor, weight: Tensor, deq_scale: Tensor, quant_bias: Tensor | None, counts: Tensor, dtype: torch.dtype
) -> Tensor:
    """See :func:`hal.ops.quant_grouped_linear_static`."""
    operation = "quant_grouped_linear_static"
    scale, bias = _of_weight(operation, weight, deq_scale, quant_bias)
    _require_int8(operation, x, weight, counts, dtype)
    return project(x, weight, counts, dtype, weight_scale=scale, bias=bias)


def quant_grouped_linear_dynamic(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, counts: Tensor, dtype: torch.dtype
) -> Tensor:
    """See :func:`hal.ops.quant_grouped_linear_dynamic`."""
    operation = "quant_grouped_linear_dynamic"
    scale, _ = _of_weight(operation, weight, weight_scale)
    _require_int8(operation, x, weight, counts, dtype)
    require(x_scale.shape == x.shape[:1] and x_scale.dtype is torch.float32, operation, x_scale, x)
    return project(x, weight, counts, dtype, x_scale=x_scale.contiguous(), weight_scale=scale)


def grouped_linear_int8(x: Tensor, weight: Tensor, weight_scale: Tensor, counts: Tensor) -> Tensor:
    """See :func:`hal.ops.grouped_linear_int8`. The sums are scaled, and the weights are not rounded."""
    scale, _ = _of_weight("grouped_linear_int8", weight, weight_scale)
    require(_matches(x, weight, counts), "grouped_linear_int8", x, weight, counts)
    return project(x, weight, counts, x.dtype, weight_scale=scale)


def quant_expert_mlp_dynamic(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    weights: Tensor,
    experts: Tensor,
) -> Tensor:
    """See :func:`hal.ops.quant_expert_mlp_dynamic`. Each token is quantized once, not once for each of its experts."""
    operation = "quant_expert_mlp_dynamic"
    require_mlp(operation, x, gate_up, down, weights, experts)
    gate_up_scale, _ = _of_weight(operation, gate_up, gate_up_scale)
    down_scale, _ = _of_weight(operation, down, down_scale)
    quantized, scale = dynamic_quantize(x)
    found = order(experts, gate_up.shape[0], tokens=True)
    activated = project(
        quantized,
        gate_up,
        found.counts,
        x.dtype,
        tokens=found.tokens,
        x_scale=scale,
        weight_scale=gate_up_scale,
        gated=True,
    )
    quantized, scale = dynamic_quantize(activated)
    rows = project(quantized, down, found.counts, x.dtype, x_scale=scale, weight_scale=down_scale)
    return expert_unpermute(rows, found.positions, weights)


def quant_expert_mlp_static(
    x: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_bias: Tensor | None,
    down_input_scale: Tensor,
    down_input_offset: Tensor | None,
    down: Tensor,
    down_scale: Tensor,
    down_bias: Tensor | None,
    weights: Tensor,
    experts: Tensor,
) -> Tensor:
    """See :func:`hal.ops.quant_expert_mlp_static`. The first product quantizes its result."""
    operation = "quant_expert_mlp_static"
    require_mlp(operation, x, gate_up, down, weights, experts)
    require_quantizer(operation, x, down.shape[2], down_input_scale, down_input_offset)
    gate_up_scale, gate_up_bias = _of_weight(operation, gate_up, gate_up_scale, gate_up_bias)
    down_scale, down_bias = _of_weight(operation, down, down_scale, down_bias)
    found = order(experts, gate_up.shape[0], tokens=True)
    activated = project(
        quantize(x, scale, offset),
        gate_up,
        found.counts,
        torch.int8,
        tokens=found.tokens,
        weight_scale=gate_up_scale,
        bias=gate_up_bias,
        gated=True,
        quantizer=(down_input_scale, down_input_offset),
    )
    rows = project(activated, down, found.counts, x.dtype, weight_scale=down_scale, bias=down_bias)
    return expert_unpermute(rows, found.positions, weights)


def _of_weight(
    operation: str, weight: Tensor, scale: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the scale and the bias of an int8 weight, contiguous.

    Raises:
        OperationError: their shapes or dtypes do not match the weight's.
    """
    fits = weight.dim() == 3 and weight.dtype is torch.int8 and scale.shape == weight.shape[:2]
    if bias is not None:
        fits = fits and bias.shape == scale.shape and bias.dtype is torch.int32
        bias = bias.contiguous()
    # Its first tensor must be floating-point, which the scale is.
    require(fits and scale.dtype is torch.float32, operation, scale, weight, *([] if bias is None else [bias]))
    return scale.contiguous(), bias


def _matches(x: Tensor, weight: Tensor, counts: Tensor) -> bool:
    fits = x.dim() == 2 and weight.shape[2] == x.shape[1] and counts.shape == weight.shape[:1]
    return fits and counts.dtype is torch.int64


def _require_int8(operation: str, x: Tensor, weight: Tensor, counts: Tensor, dtype: torch.dtype) -> None:
    if _matches(x, weight, counts) and x.dtype is torch.int8 and dtype in FLOATING and x.device == weight.device:
        return
    raise OperationError(
        f"{operation} was given {x.dtype}{list(x.shape)} for the weight {list(weight.shape)}, counts "
        f"{counts.dtype}{list(counts.shape)} and the result's dtype {dtype}",
        "give int8 rows of the weight's in_features, one int64 count for each expert, and a floating dtype",
    )
