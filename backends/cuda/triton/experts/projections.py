"""Projections of experts with weights in any form."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.ops.forms import FLOAT, Form
from hal.ops.projection import floating_bias

from ..arguments import require_form
from ..low_bits.product import MANY, project_packed, tiles
from ..low_bits.unpack import Packed
from ..low_bits.widen import widened
from .grouped import project, require_bias, require_weight


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
