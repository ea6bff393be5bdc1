"""Python bindings of the C++ kernels of int8 activations."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from hal.ops.kernels.torch_kernels import int8_projections
from hal.ops.quantization import int8_matmul

from ..kernels import int8_product, multiplies_int8
from .arguments import DTYPES, Bindings, require

INT8_KERNELS = ("dynamic_quantize", "quant_linear_dynamic", "quant_linear_static", "quantize")
MOST_ROWS = 64
"""Rows above which torch's product is used."""


class Int8Kernels(Bindings):
    """The bindings, as :mod:`.kernels` describes them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self._quantize = self.function("quantize", None, *[c_void_p] * 4, c_int, *[c_int64] * 2)
        self._dynamic = self.function("dynamic_quantize", None, *[c_void_p] * 3, c_int, *[c_int64] * 2)
        self._linear = self.function("int8_linear", None, *[c_void_p] * 7, *[c_int] * 2, *[c_int64] * 3)
        self._many = int8_projections(int8_product if multiplies_int8() else int8_matmul)

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

    def quant_linear_dynamic(
        self,
        x: Tensor,
        x_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.quant_linear_dynamic`. Few rows read the weight once."""
        fits = x_scale.shape == x.shape[:-1] and x_scale.dtype is torch.float32 and x_scale.is_cpu
        if fits and _fits(x, weight, weight_scale, dtype, bias, (torch.float32, dtype)):
            return self._few_rows(x, x_scale, weight, weight_scale, None, bias, dtype, out)
        values = self._many["quant_linear_dynamic"](x, x_scale, weight, weight_scale, bias, dtype)
        return values if out is None else out.copy_(values)

    def quant_linear_static(
        self,
        x: Tensor,
        weight: Tensor,
        deq_scale: Tensor,
        quant_bias: Tensor | None,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.quant_linear_static`. Few rows read the weight once."""
        if _fits(x, weight, deq_scale, dtype, quant_bias, (torch.int32,)):
            return self._few_rows(x, None, weight, deq_scale, quant_bias, None, dtype, out)
        values = self._many["quant_linear_static"](x, weight, deq_scale, quant_bias, dtype)
        return values if out is None else out.copy_(values)

    def _few_rows(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        weight: Tensor,
        scale: Tensor,
        add: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
        out: Tensor | None,
    ) -> Tensor:
        features, width = weight.shape
        y = torch.empty((*x.shape[:-1], features), dtype=dtype) if out is None else out
        x, weight, scale = x.contiguous(), weight.contiguous(), scale.contiguous()
        x_scale, add, bias = (None if each is None else each.contiguous() for each in (x_scale, add, bias))
        self._linear(
            x.data_ptr(),
            None if x_scale is None else x_scale.data_ptr(),
            weight.data_ptr(),
            scale.data_ptr(),
            None if add is None else add.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            DTYPES[dtype],
            bias is not None and bias.dtype is torch.float32,
            x.numel() // width,
            width,
            features,
        )
        return y


def _fits(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    added: Tensor | None,
    dtypes: tuple[torch.dtype, ...],
) -> bool:
    """Return whether the C++ kernel takes the tensors: few rows, of the shapes and dtypes of the declaration."""
    features, width = weight.shape
    fits = x.dtype is weight.dtype is torch.int8 and x.shape[-1] == width and dtype in DTYPES
    fits = fits and 0 < x.numel() <= MOST_ROWS * width and scale.dtype is torch.float32 and scale.shape == (features,)
    fits = fits and (added is None or (added.dtype in dtypes and added.shape == (features,)))
    return fits and all(each is None or each.is_cpu for each in (x, weight, scale, added))
