"""Kernels of grouped projections that call one of a projection for each expert with rows.

The number of rows of an expert is a value, so a tape records each as one call, and gives it ``out``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hal.errors import OperationError
from hal.ops.forms import Form
from hal.ops.kernels.kernel_table import Kernel


def by_expert(linear: Kernel) -> Callable[..., Tensor]:
    """Return a kernel of ``grouped_linear`` from one of ``linear`` that takes ``out``."""

    def grouped_linear(
        x: Tensor,
        weight: Tensor,
        counts: Tensor,
        bias: Tensor | None,
        weight_scale: Tensor | None,
        weight_zero_point: Tensor | None,
        x_scale: Tensor | None,
        dtype: torch.dtype | None,
        form: Form,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        output = x.new_empty(x.shape[0], weight.shape[1], dtype=dtype) if out is None else out
        for expert, start, end in spans(counts, x.shape[0]):
            given = (each if each is None else each[expert] for each in (weight, bias, weight_scale, weight_zero_point))
            of_rows = None if x_scale is None else x_scale[start:end]
            linear(x[start:end], *given, of_rows, dtype, form, out=output[start:end])
        return output

    return grouped_linear


def spans(counts: Tensor, rows: int) -> list[tuple[int, int, int]]:
    """Return each expert with rows, its first row and its end.

    Raises:
        OperationError: a count is negative, or they add up to more than ``rows``.
    """
    found, start = [], 0
    for expert, count in enumerate(counts.tolist()):
        if not 0 <= count <= rows - start:
            raise wrong_counts(counts, rows)
        if count:
            found.append((expert, start, start + count))
        start += count
    return found


def wrong_counts(counts: Tensor, rows: int) -> OperationError:
    """Return the error for counts that the rows do not suffice for."""
    return OperationError(
        f"grouped_linear: the experts have {counts.tolist()} rows, but x has only {rows}",
        "give the counts that expert_permute returned",
    )
