"""Projections with packed weights: which of the kernels, or of torch's functions, takes which arguments."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hal.ops.forms import Form
from hal.ops.kernels.form_kernels import plain
from hal.ops.projection import floating_bias

from ..arguments import require_form
from .product import MANY, project_packed, tiles
from .unpack import Packed
from .widen import widened

INT8S = 128
"""What int8 numbers are at most."""


def takes(form: Form) -> bool:
    """Return whether :func:`linear` takes a form. By the weights of other forms, cuBLAS multiplies as they are."""
    return not plain(form) and not form.exact


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    x_scale: Tensor | None,
    dtype: torch.dtype | None,
    form: Form,
) -> Tensor:
    """See :func:`hal.ops.linear`. For many rows, a launch widens the weight, and torch multiplies.

    Scaled weights of groups and blocks are rounded to the result's dtype, and of many int8 rows the product.
    """
    require_form("linear", form, x, weight, bias, weight_scale, weight_zero_point, x_scale, dtype)
    bias = floating_bias(bias, weight_scale, form)
    dtype, count = dtype or x.dtype, x.numel() // max(x.shape[-1], 1)
    packed = Packed.of(form, weight, weight_scale, weight_zero_point)
    if packed is not None and count <= MANY:
        chosen = tiles(count, dtype.itemsize, packed.kind, len(weight))
        return project_packed(x, packed, bias, chosen, x_scale=x_scale, dtype=dtype)
    wide = widened(form, packed, weight, weight_scale, weight_zero_point, dtype)
    if x_scale is None:
        return functional.linear(x.to(dtype), wide, None if bias is None else bias.to(dtype))
    # A power of two keeps numbers exact, and the product within float16.
    product = functional.linear(x.to(dtype) / INT8S, wide) * (x_scale * INT8S).unsqueeze(-1)
    return (product if bias is None else product + bias).to(dtype)
