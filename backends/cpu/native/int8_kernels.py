"""Python bindings of the C++ kernels of int8 activations."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from hal.ops.forms import Form

from ..low_bits import exact_linear
from .arguments import DTYPES, Bindings, addresses, require

INT8_KERNELS = ("dynamic_quantize", "quantize")
MOST_ROWS = 64
"""Rows above which torch's product is used."""


class Int8Kernels(Bindings):
    """The bindings, as :mod:`.kernels` describes them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self._quantize = self.function("quantize", None, *[c_void_p] * 4, c_int, *[c_int64] * 2)
        self._dynamic = self.function("dynamic_quantize", None, *[c_void_p] * 3, c_int, *[c_int64] * 2)
        self._linear = self.function("int8_linear", None, *[c_void_p] * 7, *[c_int] * 2, *[c_int64] * 3)

    def quantize(self, x: Tensor, scale: Tensor, offset: Tensor | None, *, out: Tensor | None = None) -> Tensor:
        """See :func:`hal.ops.quantize`."""
        fits = scale.dtype is torch.float32 and scale.numel() > 0
        fits = fits and (offset is None or (offset.dtype is torch.int32 and offset.shape == scale.shape))
        require(fits and x.dim() > 0, "quantize", x, scale, *([] if offset is None else [offset]))
        x = x.contiguous()
        y = torch.empty(x.shape, dtype=torch.int8) if out is None else out
        at = None if offset is None else offset.data_ptr()
        width = x.shape[-1]
        rows = x.numel() // max(width, 1)
        self._quantize(x.data_ptr(), scale.data_ptr(), at, y.data_ptr(), DTYPES[x.dtype], rows, width)
        return y

    def dynamic_quantize(self, x: Tensor, *, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """See :func:`hal.ops.dynamic_quantize`. It reads each row from memory once."""
        require(x.dim() > 0, "dynamic_quantize", x)
        x = x.contiguous()
        *leading, width = x.shape
        new = torch.empty(x.shape, dtype=torch.int8), torch.empty(leading, dtype=torch.float32)
        y, scales = new if out is None else out
        rows = x.numel() // max(width, 1)
        self._dynamic(x.data_ptr(), y.data_ptr(), scales.data_ptr(), DTYPES[x.dtype], rows, width)
        return y, scales

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_scale: Tensor,
        weight_zero_point: Tensor | None,
        x_scale: Tensor | None,
        dtype: torch.dtype,
        form: Form,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.linear`, of forms whose sums are exact. Few rows read the weight once."""
        if not _fits(x, weight, bias, weight_scale, x_scale, dtype):
            return exact_linear(x, weight, bias, weight_scale, None, x_scale, dtype, form, out=out)
        features, width = weight.shape
        y = torch.empty((*x.shape[:-1], features), dtype=dtype) if out is None else out
        x, weight, scale = x.contiguous(), weight.contiguous(), weight_scale.contiguous()
        x_scale, bias = (None if each is None else each.contiguous() for each in (x_scale, bias))
        added = None if bias is None else bias.data_ptr()
        of_sums = bias is not None and bias.dtype is torch.int32
        self._linear(
            *addresses(x, x_scale, weight, scale),
            added if of_sums else None,
            None if of_sums else added,
            y.data_ptr(),
            DTYPES[dtype],
            bias is not None and bias.dtype is torch.float32,
            x.numel() // width,
            width,
            features,
        )
        return y


def _fits(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, x_scale: Tensor | None, dtype: torch.dtype
) -> bool:
    """Return whether the C++ kernel takes the tensors: few rows, of the shapes and dtypes of the declaration."""
    features, width = weight.shape
    fits = x.dtype is weight.dtype is torch.int8 and x.shape[-1] == width and dtype in DTYPES
    fits = fits and 0 < x.numel() <= MOST_ROWS * width and scale.dtype is torch.float32 and scale.shape == (features, 1)
    dtypes = torch.int32, torch.float32, dtype
    fits = fits and (bias is None or (bias.dtype in dtypes and bias.shape == (features,)))
    fits = fits and (x_scale is None or (x_scale.dtype is torch.float32 and x_scale.shape == x.shape[:-1]))
    return fits and all(each is None or each.is_cpu for each in (x, weight, bias, scale, x_scale))
