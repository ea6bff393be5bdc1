"""MLPs of experts in W8A8, static and dynamic."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import require
from ..quantization import dynamic_quantize, quantize, require_quantizer
from .grouped import project
from .mlp import require_mlp
from .permutation import expert_unpermute, order


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
    _require_int8(operation, gate_up, gate_up_scale)
    _require_int8(operation, down, down_scale)
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
    _require_int8(operation, gate_up, gate_up_scale, gate_up_bias)
    _require_int8(operation, down, down_scale, down_bias)
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


def _require_int8(operation: str, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
    """Check an int8 weight, its scale and its bias.

    Raises:
        OperationError: their shapes or dtypes do not match.
    """
    fits = weight.dtype is torch.int8 and scale.shape == (*weight.shape[:2], 1)
    fits = fits and (bias is None or (bias.shape == weight.shape[:2] and bias.dtype is torch.int32))
    # Its first tensor must be floating-point, which the scale is.
    require(fits, operation, scale, weight, *([] if bias is None else [bias]))
