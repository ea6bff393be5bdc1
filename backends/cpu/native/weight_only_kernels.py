"""Python bindings of the C++ kernels of projections with weights of 8 or 4 bits, and of lookups of their rows."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from hal.errors import OperationError
from hal.ops.experts.mxfp4 import GROUP

from .. import kernels, low_bits
from ..grouped import wrong_counts
from ..low_bits import Widen
from .arguments import DTYPES, Bindings, empty, require

WEIGHT_ONLY_KERNELS = (
    "linear_int8",
    "mxfp4_grouped_linear",
    "quant_grouped_linear_int4",
    "quant_linear_int4",
    "weight_only_embedding",
    "weight_only_grouped_linear",
    "weight_only_linear",
)
ZEROS = {**DTYPES, torch.int8: 3}
"""Codes of the dtypes of zero points in C++."""
FACTORS = {**ZEROS, torch.uint8: 4}
"""Codes of the dtypes of scales and zero points in C++."""
NUMBERS = {torch.int8: (0, 1), torch.int32: (1, 8), torch.uint8: (2, 2)}
"""Codes of what a weight of each dtype holds in C++, and how many numbers an element holds."""
MOST_ROWS = 64
"""Rows above which a weight is widened for oneDNN's product."""


class WeightOnlyKernels(Bindings):
    """The bindings, as :mod:`.kernels` describes them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self._weight_only = self.function("weight_only_linear", None, *[c_void_p] * 6, *[c_int] * 5, *[c_int64] * 5)
        self._embedding = self.function("weight_only_embedding", c_int64, *[c_void_p] * 5, *[c_int] * 5, *[c_int64] * 4)
        given = *[c_void_p] * 7, *[c_int] * 5, *[c_int64] * 6
        self._grouped = self.function("weight_only_grouped_linear", c_int64, *given)

    def linear_int8(
        self, x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, *, out: Tensor | None = None
    ) -> Tensor:
        """See :func:`hal.ops.linear_int8`. Few rows read the weight once, and do not widen it."""
        if _few(x, weight, weight_scale.unsqueeze(-1), None, bias, x.shape[-1]):
            return self._few_rows(x, weight, weight_scale, None, bias, x.shape[-1], out)
        scale = weight_scale.unsqueeze(-1)
        if _fits(x, weight, scale, None, bias, x.shape[-1]):
            return low_bits.weight_only_linear(x, weight, scale, None, bias, x.shape[-1], out=out, widen=self._widened)
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
        given = x, weight, weight_scale, weight_zero_point, bias, group_size
        if _few(*given):
            return self._few_rows(*given, out)
        return low_bits.weight_only_linear(*given, out=out, widen=self._widen_for(*given))

    def weight_only_embedding(
        self,
        token_ids: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        weight_zero_point: Tensor | None,
        width: int,
        group_size: int,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.weight_only_embedding`.

        Raises:
            OperationError: the weight has no row of a token, or shapes or dtypes are not the declared ones.
        """
        zero = weight_zero_point
        y = torch.empty((*token_ids.shape, width), dtype=dtype) if out is None else out
        fits = token_ids.dim() == 1 and token_ids.dtype in (torch.int64, torch.int32) and weight.dim() == 2
        fits = fits and weight.dtype is not torch.uint8 and _fits(y, weight, weight_scale, zero, None, group_size)
        factors = (weight_scale,) if zero is None else (weight_scale, zero)
        require(fits, "weight_only_embedding", y, weight, *factors, indices=(token_ids,))
        outside = self._write_rows(token_ids.contiguous(), weight, weight_scale, zero, group_size, y)
        if outside:
            raise OperationError(
                f"weight_only_embedding: a token is outside the table of {weight.shape[0]} rows: "
                f"{token_ids.min()} to {token_ids.max()}",
                "check the batch's token_ids",
            )
        return y

    def quant_linear_int4(self, *arguments: Any, out: Tensor | None = None) -> Tensor:
        """See :func:`hal.ops.quant_linear_int4`. The product is that of :meth:`weight_only_linear`, in float32."""
        return low_bits.quant_linear_int4(*arguments, out=out, product=self.weight_only_linear)

    def weight_only_grouped_linear(
        self,
        x: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        weight_zero_point: Tensor | None,
        counts: Tensor,
        bias: Tensor | None,
        group_size: int,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.weight_only_grouped_linear`. It reads only the weights of experts with rows."""
        given = x, weight, weight_scale, weight_zero_point, counts, bias, group_size
        if weight.dtype is not torch.uint8 and _few_by_expert(*given):
            return self._by_expert("weight_only_grouped_linear", *given, out)
        widen = self._widen_for(x, weight, weight_scale, weight_zero_point, bias, group_size)
        return low_bits.weight_only_grouped_linear(*given, out=out, widen=widen)

    def mxfp4_grouped_linear(
        self,
        x: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        counts: Tensor,
        bias: Tensor | None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.mxfp4_grouped_linear`. It reads only the weights of experts with rows."""
        given = x, weight, weight_scale, None, counts, bias, GROUP
        if weight.dtype is weight_scale.dtype is torch.uint8 and _few_by_expert(*given):
            return self._by_expert("mxfp4_grouped_linear", *given, out)
        widen = self._widen_for(x, weight, weight_scale, None, bias, GROUP)
        return low_bits.mxfp4_grouped_linear(x, weight, weight_scale, counts, bias, out=out, widen=widen)

    def quant_grouped_linear_int4(self, *arguments: Any, out: Tensor | None = None) -> Tensor:
        """See :func:`hal.ops.quant_grouped_linear_int4`. The product is that of weights only, in float32."""
        return low_bits.quant_grouped_linear_int4(*arguments, out=out, product=self.weight_only_grouped_linear)

    def _by_expert(
        self,
        operation: str,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        counts: Tensor,
        bias: Tensor | None,
        group_size: int,
        out: Tensor | None,
    ) -> Tensor:
        (num_experts, features), (rows, width) = weight.shape[:2], x.shape
        y = empty((rows, features), x) if out is None else out
        x = x if x.stride(1) == 1 else x.contiguous()
        scale, weight, counts = scale.contiguous(), weight.contiguous(), counts.contiguous()
        zero = None if zero is None else zero.contiguous()
        bias = None if bias is None else bias.contiguous()
        wrong = self._grouped(
            x.data_ptr(),
            weight.data_ptr(),
            scale.data_ptr(),
            None if zero is None else zero.data_ptr(),
            counts.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            DTYPES[x.dtype],
            FACTORS[scale.dtype],
            0 if zero is None else ZEROS[zero.dtype],
            bias is not None and bias.dtype is torch.float32,
            NUMBERS[weight.dtype][0],
            rows,
            num_experts,
            width,
            features,
            min(group_size, width),
            x.stride(0),
        )
        if wrong:
            raise wrong_counts(operation, counts, rows)
        return y

    def _widen_for(
        self,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        bias: Tensor | None,
        group_size: int,
    ) -> Widen:
        """Return what widens rows of the weight for many rows of x."""
        return self._widened if _fits(x, weight, scale, zero, bias, group_size) else low_bits.widened

    def _widened(
        self,
        weight: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        group_size: int,
        dtype: torch.dtype,
        start: int,
        end: int,
    ) -> Tensor:
        """See :func:`.low_bits.widened`."""
        y = torch.empty(end - start, weight.shape[-1] * NUMBERS[weight.dtype][1], dtype=dtype)
        zero = None if zero is None else zero[start:end]
        self._write_rows(None, weight[start:end], scale[start:end], zero, group_size, y)
        return y

    def _write_rows(
        self, ids: Tensor | None, weight: Tensor, scale: Tensor, zero: Tensor | None, group_size: int, y: Tensor
    ) -> bool:
        """Write the scaled rows of the ids, or all, to y. Return whether a row is outside the weight."""
        weight, scale = weight.contiguous(), scale.contiguous()
        zero = None if zero is None else zero.contiguous()
        rows, width = y.shape
        outside = self._embedding(
            None if ids is None else ids.data_ptr(),
            weight.data_ptr(),
            scale.data_ptr(),
            None if zero is None else zero.data_ptr(),
            y.data_ptr(),
            DTYPES[y.dtype],
            FACTORS[scale.dtype],
            0 if zero is None else ZEROS[zero.dtype],
            NUMBERS[weight.dtype][0],
            ids is not None and ids.dtype is torch.int64,
            rows,
            width,
            weight.shape[0],
            min(group_size, width),
        )
        return bool(outside)

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
            0 if zero is None else ZEROS[zero.dtype],
            bias is not None and bias.dtype is torch.float32,
            NUMBERS[weight.dtype][0],
            x.shape[0],
            width,
            features,
            min(group_size, width),
            x.stride(0),
        )
        return y


def _few(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, group_size: int) -> bool:
    """Return whether the C++ kernel takes the tensors: few rows, of the shapes and dtypes of the declaration."""
    return 0 < x.numel() <= MOST_ROWS * x.shape[-1] and _fits(x, weight, scale, zero, bias, group_size)


def _few_by_expert(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    counts: Tensor,
    bias: Tensor | None,
    group_size: int,
) -> bool:
    """Return whether the C++ kernel of experts takes the tensors: few rows of each expert, as above."""
    num_experts = weight.shape[0]
    fits = x.dim() == 2 and 0 < x.shape[0] <= MOST_ROWS * num_experts and counts.is_cpu
    fits = fits and counts.shape == (num_experts,) and counts.dtype is torch.int64
    return fits and _fits(x, weight, scale, zero, bias, group_size)


def _fits(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, group_size: int) -> bool:
    """Return whether the tensors have the shapes and dtypes of the declaration."""
    width, of_out = x.shape[-1], weight.shape[:-1]
    fits = x.dtype in DTYPES and weight.dtype in NUMBERS and group_size > 0
    if not fits or weight.shape[-1] * NUMBERS[weight.dtype][1] != width:
        return False
    factors = (*of_out, -(-width // group_size))
    fits = scale.shape == factors and scale.dtype in FACTORS
    fits = fits and (scale.dtype is torch.uint8) == (weight.dtype is torch.uint8)
    fits = fits and (zero is None or (zero.shape == factors and zero.dtype in ZEROS))
    fits = fits and (bias is None or (bias.shape == of_out and bias.dtype in (torch.float32, x.dtype)))
    return fits and all(each is None or each.is_cpu for each in (x, weight, scale, zero, bias))
