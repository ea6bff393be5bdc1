"""Python bindings of the C++ kernels of projections with weights of 8 or 4 bits."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from .arguments import DTYPES, Bindings, empty

FACTORS = {**DTYPES, torch.int8: 3}
"""Codes of the dtypes of scales and zero points in C++."""
MOST_ROWS = 64
"""Rows above which widening a weight once costs less than it gains."""
BLOCK = 128
"""Elements of a row of x that have one scale."""


class WeightOnlyKernels(Bindings):
    """The bindings, as :mod:`.kernels` describes them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self._weight_only = self.function("weight_only_linear", None, *[c_void_p] * 6, *[c_int] * 5, *[c_int64] * 5)

    def few_rows(
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
        """Return the product of rows that :meth:`takes` accepts."""
        features, width = weight.shape[0], x.shape[-1]
        y = empty((*x.shape[:-1], features), x) if out is None else out
        x = x if x.dim() == 2 else x.reshape(-1, width)
        x = x if x.stride(1) == 1 else x.contiguous()
        zeros = weight_zero_point
        self._weight_only(
            x.data_ptr(),
            weight.data_ptr(),
            weight_scale.data_ptr(),
            None if zeros is None else zeros.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            DTYPES[x.dtype],
            FACTORS[weight_scale.dtype],
            0 if zeros is None else FACTORS[zeros.dtype],
            bias is not None and bias.dtype is torch.float32,
            4 if weight.dtype is torch.int32 else 8,
            x.shape[0],
            width,
            features,
            min(group_size, width),
            x.stride(0),
        )
        return y
