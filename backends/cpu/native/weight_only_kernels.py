"""Python bindings of the C++ kernels of projections with weights of 8 or 4 bits, and of lookups of their rows."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_int, c_int64, c_void_p
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hal.errors import OperationError
from hal.ops.forms import Form

from .. import low_bits
from ..capabilities import product_dtype
from ..description import ANY, of_rows
from ..low_bits import by_expert, wrong_counts
from .arguments import DTYPES, Bindings, addresses, empty, require

if TYPE_CHECKING:
    from hal.nn import WeightUse

NUMBERS = {"int8": 0, "int4": 1, "float4": 2}
"""Codes of what a weight holds in C++."""
ZEROS = {**DTYPES, torch.int8: 3}
"""Codes of the dtypes of zero points in C++."""
EXPONENTS, FLOAT8 = 4, 5
"""Codes of scales in C++ that are bits: exponents, or float8 with second scales. Others are as in :data:`DTYPES`."""
MOST_ROWS, MOST_WITHOUT_16_BITS = 64, 512
"""Rows above which a weight is widened for oneDNN's product: of 16 bits, and where it is one of float32."""


def in_groups(form: Form) -> bool:
    """Return whether the kernels take a form: scales of a row or of a group of 8 or 4 bits, and those of float4."""
    scales = (("e8m0", False), ("e4m3", True)) if form.numbers == "float4" else (("float", False),)
    return form.numbers in NUMBERS and form.rows == 1 and (form.scales, form.second) in scales


class WeightOnlyKernels(Bindings):
    """The bindings, as :mod:`.kernels` describes them.

    Attributes:
        rows_alike: up to how many rows are all multiplied in the same way, whatever their number.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self._weight_only = self.function("weight_only_linear", None, *[c_void_p] * 6, *[c_int] * 5, *[c_int64] * 5)
        self._embedding = self.function("weight_only_embedding", c_int64, *[c_void_p] * 5, *[c_int] * 5, *[c_int64] * 4)
        given = *[c_void_p] * 7, *[c_int] * 5, *[c_int64] * 6
        self._grouped = self.function("weight_only_grouped_linear", c_int64, *given)
        self._many = partial(low_bits.linear, widen=self._widened)
        self._many_by_expert = by_expert(self._many)
        self._most = MOST_WITHOUT_16_BITS if product_dtype(torch.bfloat16) is torch.float32 else MOST_ROWS
        self._integer_rows = self.function("integer_rows", c_int64)
        self.rows_alike = int(self.function("rows_alike", c_int64)())

    def describe(self, weight: Tensor, use: WeightUse) -> str:
        """Return who multiplies in :meth:`linear`, and for each expert in :meth:`grouped_linear`."""
        rounds = self._rounds(use.form, use.form.width(weight), low_bits.input_dtype(use))
        few = (self.named("as integers"), self._integer_rows() if rounds else 0), (self.named("widened"), self._most)
        return of_rows(*few, (low_bits.describe(weight, use), ANY))

    def _rounds(self, form: Form, width: int, dtype: torch.dtype) -> bool:
        """Return whether a row is multiplied as integers, by trying it: an infinity then gives NaN."""
        x, ones, shape = torch.zeros(1, width, dtype=dtype), form.kind.pack(torch.ones(1, width)), (1, width)
        x[0, 0] = math.inf
        scale = torch.ones(form.scale_shape(*shape), dtype=torch.float32 if form.scales == "float" else torch.uint8)
        return bool(self.linear(x, ones, None, scale, None, None, None, form).isnan())

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_scale: Tensor,
        weight_zero_point: Tensor | None,
        x_scale: Tensor | None,
        dtype: torch.dtype | None,
        form: Form,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.linear`. Few rows read the weight once; those of int8 are widened.

        A row of x with an element that is not finite gives NaN where it is rounded to integers.
        """
        factors = weight_scale, weight_zero_point
        if low_bits.rounded(x, x_scale, dtype):

            def product(x: Tensor, bias: Tensor | None) -> Tensor:
                return self.linear(x, weight, bias, *factors, None, None, form)

            return low_bits.scaled(product, x, bias, x_scale, dtype or x.dtype, out)
        few = 0 < x.numel() <= self._most * x.shape[-1]
        if not few or not _fits(x, weight, bias, *factors, form):
            return self._many(x, weight, bias, *factors, None, None, form, out=out)
        features, width = weight.shape[0], x.shape[-1]
        y = empty((*x.shape[:-1], features), x) if out is None else out
        x = x if x.dim() == 2 else x.reshape(-1, width)
        x = x if x.stride(1) == 1 else x.contiguous()
        weight, bias, scale, zero = _contiguous(weight, bias, *factors)
        sizes = x.shape[0], width, features, form.group(width), x.stride(0)
        self._weight_only(
            *addresses(x, weight, scale, zero, bias, y), DTYPES[x.dtype], *_codes(scale, zero, bias, form), *sizes
        )
        return y

    def grouped_linear(
        self,
        x: Tensor,
        weight: Tensor,
        counts: Tensor,
        bias: Tensor | None,
        weight_scale: Tensor,
        weight_zero_point: Tensor | None,
        x_scale: Tensor | None,
        dtype: torch.dtype | None,
        form: Form,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.grouped_linear`. It reads only the weights of experts with rows.

        Raises:
            OperationError: the counts exceed the rows.
        """
        factors = weight_scale, weight_zero_point
        if low_bits.rounded(x, x_scale, dtype):
            if bias is not None and x_scale is not None:
                return self._many_by_expert(x, weight, counts, bias, *factors, x_scale, dtype, form, out=out)

            def product(x: Tensor, bias: Tensor | None) -> Tensor:
                return self.grouped_linear(x, weight, counts, bias, *factors, None, None, form)

            return low_bits.scaled(product, x, bias, x_scale, dtype or x.dtype, out)
        num_experts, features = weight.shape[:2]
        few = x.dim() == 2 and 0 < x.shape[0] <= self._most * num_experts
        few = few and counts.is_cpu and counts.shape == (num_experts,) and counts.dtype is torch.int64
        if not few or not _fits(x, weight, bias, *factors, form):
            return self._many_by_expert(x, weight, counts, bias, *factors, None, None, form, out=out)
        rows, width = x.shape
        y = empty((rows, features), x) if out is None else out
        x, counts = x if x.stride(1) == 1 else x.contiguous(), counts.contiguous()
        weight, bias, scale, zero = _contiguous(weight, bias, *factors)
        sizes = rows, num_experts, width, features, form.group(width), x.stride(0)
        wrong = self._grouped(
            *addresses(x, weight, scale, zero, counts, bias, y),
            DTYPES[x.dtype],
            *_codes(scale, zero, bias, form),
            *sizes,
        )
        if wrong:
            raise wrong_counts(counts, rows)
        return y

    def embedding(
        self,
        token_ids: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        weight_zero_point: Tensor | None,
        dtype: torch.dtype | None,
        form: Form,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.embedding`.

        Raises:
            OperationError: the weight has no row of a token, or shapes or dtypes are not the declared ones.
        """
        zero = weight_zero_point
        y = torch.empty((*token_ids.shape, form.width(weight)), dtype=dtype) if out is None else out
        fits = token_ids.dim() == 1 and token_ids.dtype in (torch.int64, torch.int32) and weight.dim() == 2
        fits = fits and _fits(y, weight, None, weight_scale, zero, form)
        factors = (weight_scale,) if zero is None else (weight_scale, zero)
        require(fits, "embedding", y, weight, *factors, indices=(token_ids,))
        if self._write_rows(token_ids.contiguous(), weight, weight_scale, zero, form, y):
            raise OperationError(
                f"embedding: a token is outside the table of {weight.shape[0]} rows: "
                f"{token_ids.min()} to {token_ids.max()}",
                "check the batch's token_ids",
            )
        return y

    def _widened(
        self,
        form: Form,
        weight: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        dtype: torch.dtype,
        start: int,
        end: int,
    ) -> Tensor:
        """See :func:`.low_bits.widened`."""
        y = torch.empty(end - start, form.width(weight), dtype=dtype)
        if not _fits(y, weight, None, scale, zero, form):
            return low_bits.widened(form, weight, scale, zero, dtype, start, end)
        zero = None if zero is None else zero[start:end]
        self._write_rows(None, weight[start:end], scale[start:end], zero, form, y)
        return y

    def _write_rows(
        self, ids: Tensor | None, weight: Tensor, scale: Tensor, zero: Tensor | None, form: Form, y: Tensor
    ) -> bool:
        """Write the scaled rows of the ids, or all, to y. Return whether a row is outside the weight."""
        weight, _, scale, zero = _contiguous(weight, None, scale, zero)
        rows, width = y.shape
        scales, zeros, _, numbers = _codes(scale, zero, None, form)
        sizes = rows, width, weight.shape[0], form.group(width)
        outside = self._embedding(
            *addresses(ids, weight, scale, zero, y),
            DTYPES[y.dtype],
            scales,
            zeros,
            numbers,
            ids is not None and ids.dtype is torch.int64,
            *sizes,
        )
        return bool(outside)


def _contiguous(weight: Tensor, bias: Tensor | None, scale: Tensor, zero: Tensor | None) -> Any:
    return tuple(None if each is None else each.contiguous() for each in (weight, bias, scale, zero))


def _codes(scale: Tensor, zero: Tensor | None, bias: Tensor | None, form: Form) -> tuple[int, int, bool, int]:
    """Return the codes of scales and zero points, whether the bias is of float32, and the code of the numbers."""
    wide_bias = bias is not None and bias.dtype is torch.float32
    bits = EXPONENTS if form.scales == "e8m0" else FLOAT8
    return DTYPES.get(scale.dtype, bits), 0 if zero is None else ZEROS[zero.dtype], wide_bias, NUMBERS[form.numbers]


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, zero: Tensor | None, form: Form) -> bool:
    """Return whether the tensors have the shapes and dtypes of the declaration, so that C++ may read them."""
    width, of_out = x.shape[-1], weight.shape[:-1]
    fits = x.dtype in DTYPES and weight.dtype is form.kind.dtype and form.width(weight) == width > 0
    if not fits:
        return False
    factors = (*of_out[:-1], *form.scale_shape(of_out[-1], width))
    fits = scale.shape == factors and scale.dtype in (DTYPES if form.scales == "float" else (torch.uint8,))
    fits = fits and (zero is None or (zero.shape == factors and zero.dtype in ZEROS))
    fits = fits and (bias is None or (bias.shape == of_out and bias.dtype in (torch.float32, x.dtype)))
    return fits and all(each is None or each.is_cpu for each in (x, weight, bias, scale, zero))
