"""Kernels of grouped projections that call torch once for each expert with rows.

The number of rows of an expert is a value, so a tape records each as one call, and gives it ``out``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from hal.errors import OperationError
from hal.ops.kernels.kernel_table import Kernel

Product = Callable[[Tensor, Tensor], Tensor]
"""Returns ``x @ weight.T`` of int8 matrices, in int32, as a new tensor."""


def grouped_linear(
    x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """See :func:`hal.ops.grouped_linear`."""
    output = x.new_empty(x.shape[0], weight.shape[1]) if out is None else out
    for expert, start, end in spans("grouped_linear", counts, x.shape[0]):
        own = None if bias is None else bias[expert].to(x.dtype)
        output[start:end] = functional.linear(x[start:end], weight[expert], own)
    return output


def grouped_linear_int8(
    x: Tensor, weight: Tensor, weight_scale: Tensor, counts: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """See :func:`hal.ops.grouped_linear_int8`. It rounds the scaled weights to x's dtype."""
    output = x.new_empty(x.shape[0], weight.shape[1]) if out is None else out
    for expert, start, end in spans("grouped_linear_int8", counts, x.shape[0]):
        wide = (weight[expert].float() * weight_scale[expert].unsqueeze(-1)).to(x.dtype)
        output[start:end] = functional.linear(x[start:end], wide)
    return output


def int8_kernels(product: Product) -> dict[str, Kernel]:
    """Return kernels for ``quant_grouped_linear_static`` and ``quant_grouped_linear_dynamic``."""

    def quant_grouped_linear_static(
        x: Tensor,
        weight: Tensor,
        deq_scale: Tensor,
        quant_bias: Tensor | None,
        counts: Tensor,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        output = torch.empty(x.shape[0], weight.shape[1], dtype=dtype) if out is None else out
        for expert, start, end in spans("quant_grouped_linear_static", counts, x.shape[0]):
            sums = product(x[start:end], weight[expert])
            if quant_bias is not None:
                sums += quant_bias[expert]
            output[start:end] = sums * deq_scale[expert]
        return output

    def quant_grouped_linear_dynamic(
        x: Tensor,
        x_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        counts: Tensor,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        output = torch.empty(x.shape[0], weight.shape[1], dtype=dtype) if out is None else out
        for expert, start, end in spans("quant_grouped_linear_dynamic", counts, x.shape[0]):
            values = (product(x[start:end], weight[expert]) * weight_scale[expert]).mul_(x_scale[start:end, None])
            output[start:end] = values
        return output

    return {
        "quant_grouped_linear_dynamic": quant_grouped_linear_dynamic,
        "quant_grouped_linear_static": quant_grouped_linear_static,
    }


def spans(operation: str, counts: Tensor, rows: int) -> list[tuple[int, int, int]]:
    """Return each expert with rows, its first row and its end.

    Raises:
        OperationError: a count is negative, or they add up to more than ``rows``.
    """
    found, start = [], 0
    for expert, count in enumerate(counts.tolist()):
        if not 0 <= count <= rows - start:
            raise wrong_counts(operation, counts, rows)
        if count:
            found.append((expert, start, start + count))
        start += count
    return found


def wrong_counts(operation: str, counts: Tensor, rows: int) -> OperationError:
    """Return the error for counts that the rows do not suffice for."""
    return OperationError(
        f"{operation}: the experts have {counts.tolist()} rows, but x has only {rows}",
        "give the counts that expert_permute returned",
    )
