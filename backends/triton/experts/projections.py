"""The operations of experts: projections with weights in any form, and whole MLPs without copies of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.ops import GatedActivation
from hal.ops.forms import FLOAT, Form
from hal.ops.projection import floating_bias

from ..activation import clipped_silu_and_mul, gelu_and_mul, silu_and_mul
from ..arguments import require, require_form
from ..low_bits.product import MANY, project_packed, tiles
from ..low_bits.unpack import Packed, widened
from ..quantization import dynamic_quantize, quantize, require_quantizer
from .grouped import project, require_bias, require_weight
from .permutation import expert_unpermute, order, require_routing


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    bias: Tensor | None = None,
    weight_scale: Tensor | None = None,
    weight_zero_point: Tensor | None = None,
    x_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    form: Form = FLOAT,
) -> Tensor:
    """See :func:`hal.ops.grouped_linear`. Scaled weights of groups and blocks are rounded to the result's dtype."""
    if weight_scale is None:
        require_weight("grouped_linear", x, weight, counts)
        require_bias("grouped_linear", x, weight, bias)
        return project(x, weight, counts, x.dtype, bias=bias)
    given = weight, bias, weight_scale, weight_zero_point, x_scale
    require_form("grouped_linear", form, x, *given, dtype, counts)
    dtype, floating = dtype or x.dtype, x.is_floating_point()
    if form.numbers == "int8" and form.by_row and form.scales == "float" and weight_zero_point is None:
        return project(x, weight, counts, dtype, x_scale=x_scale, weight_scale=weight_scale, bias=bias)
    bias = floating_bias(bias, weight_scale, form)
    packed = Packed.of(form, weight, weight_scale, weight_zero_point)
    average = len(x) / len(weight)
    # Many int8 rows of an expert read its weight again for each tile of them, which the GPU's cache mostly holds.
    if packed is not None and (average <= MANY or not floating):
        chosen = tiles(round(average), dtype.itemsize, packed.kind, weight.shape[1], grouped=True)
        return project_packed(x, packed, bias, chosen, counts, x_scale=x_scale, dtype=dtype)
    rows = x if floating else x.float()
    wide = widened(form, packed, weight, weight_scale, weight_zero_point, rows.dtype)
    return project(rows, wide, counts, dtype, x_scale=x_scale, bias=bias)


def expert_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: GatedActivation,
) -> Tensor:
    """See :func:`hal.ops.expert_mlp`. The first product reads the tokens' rows in place, and applies a SiLU."""
    require_mlp("expert_mlp", x, gate_up, down, weights, experts)
    require(gate_up.dtype is down.dtype is x.dtype, "expert_mlp", x, gate_up, down)
    require_bias("expert_mlp", x, gate_up, gate_up_bias)
    require_bias("expert_mlp", x, down, down_bias)
    found = order(experts, gate_up.shape[0], tokens=True)
    silu = activation == GatedActivation()
    rows = project(x, gate_up, found.counts, x.dtype, tokens=found.tokens, bias=gate_up_bias, gated=silu)
    if not silu:
        rows = activation.apply(rows, silu_and_mul, gelu_and_mul, clipped_silu_and_mul)
    output = project(rows, down, found.counts, x.dtype, bias=down_bias)
    return expert_unpermute(output, found.positions, weights)


def require_mlp(operation: str, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor) -> None:
    """Check the shapes of both weights, and the routing.

    Raises:
        OperationError: they do not match.
    """
    require_routing(operation, x, experts)
    fits = gate_up.dim() == down.dim() == 3 and gate_up.shape[0] == down.shape[0] > 0 and gate_up.shape[1] % 2 == 0
    fits = fits and gate_up.shape[2] == down.shape[1] == x.shape[1] and down.shape[2] * 2 == gate_up.shape[1]
    fits = fits and weights.shape == experts.shape and weights.dtype in (x.dtype, torch.float32)
    require(fits, operation, x, gate_up, down, weights, experts)


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
