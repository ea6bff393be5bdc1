"""Python bindings of the C++ kernels of projections with weights of 8 or 4 bits."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from .. import kernels, low_bits
from .arguments import DTYPES, Bindings, empty

WEIGHT_ONLY_KERNELS = ("linear_int8", "quant_linear_int4", "weight_only_linear")
FACTORS = {**DTYPES, torch.int8: 3}
"""Codes of the dtypes of scales and zero points in C++."""
MOST_ROWS = 64
"""Rows above which a weight is widened for oneDNN's product."""


class WeightOnlyKernels(Bindings):
    """The bindings, as :mod:`.kernels` describes them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self._weight_only = self.function("weight_only_linear", None, *[c_void_p] * 6, *[c_int] * 5, *[c_int64] * 5)

    def linear_int8(
        self, x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, *, out: Tensor | None = None
    ) -> Tensor:
        """See :func:`hal.ops.linear_int8`. Few rows read the weight once, and do not widen it."""
        if _few(x, weight, weight_scale.unsqueeze(-1), None, bias, x.shape[-1]):
            return self._few_rows(x, weight, weight_scale, None, bias, x.shape[-1], out)
        values = kernels.linear_int8(x, weight, weight_scale, bias)
        return values if out is None else out.copy_(values)

    def weight_only_linear(
        self,
        x: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        weight_zero_point: Tensor | None,
        bias: Tensor | None,
        group_size: int,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.weight_only_linear`. Few rows read the weight once.

        A row of x with an element that is not finite gives NaN.
        """
        if _few(x, weight, weight_scale, weight_zero_point, bias, group_size):
            return self._few_rows(x, weight, weight_scale, weight_zero_point, bias, group_size, out)
        return low_bits.weight_only_linear(x, weight, weight_scale, weight_zero_point, bias, group_size, out=out)

    def quant_linear_int4(self, *arguments: Any, out: Tensor | None = None) -> Tensor:
        """See :func:`hal.ops.quant_linear_int4`. The product is that of :meth:`weight_only_linear`, in float32."""
        return low_bits.quant_linear_int4(*arguments, out=out, product=self.weight_only_linear)

    def _few_rows(
        self,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        bias: Tensor | None,
        group_size: int,
        out: Tensor | None,
    ) -> Tensor:
        features, width = weight.shape[0], x.shape[-1]
        y = empty((*x.shape[:-1], features), x) if out is None else out
        x = x if x.dim() == 2 else x.reshape(-1, width)
        x = x if x.stride(1) == 1 else x.contiguous()
        scale, weight = scale.contiguous(), weight.contiguous()
        zero = None if zero is None else zero.contiguous()
        bias = None if bias is None else bias.contiguous()
        self._weight_only(
            x.data_ptr(),
            weight.data_ptr(),
            scale.data_ptr(),
            None if zero is None else zero.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            DTYPES[x.dtype],
            FACTORS[scale.dtype],
            0 if zero is None else FACTORS[zero.dtype],
            bias is not None and bias.dtype is torch.float32,
            4 if weight.dtype is torch.int32 else 8,
            x.shape[0],
            width,
            features,
            min(group_size, width),
            x.stride(0),
        )
        return y


def _few(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, group_size: int) -> bool:
    """Return whether the C++ kernel takes the tensors: few rows, of the shapes and dtypes of the declaration."""
    width, features = x.shape[-1], weight.shape[0]
    packed = 8 if weight.dtype is torch.int32 else 1
    factors = (features, -(-width // max(group_size, 1)))
    fits = 0 < x.numel() <= MOST_ROWS * width and group_size > 0 and x.dtype in DTYPES
    fits = fits and weight.shape[1] * packed == width and weight.dtype in (torch.int8, torch.int32)
    fits = fits and scale.shape == factors and scale.dtype in DTYPES
    fits = fits and (zero is None or (zero.shape == factors and zero.dtype in FACTORS))
    fits = fits and (bias is None or (bias.shape == (features,) and bias.dtype in (torch.float32, x.dtype)))
    return fits and all(each is None or each.is_cpu for each in (x, weight, scale, zero, bias))
