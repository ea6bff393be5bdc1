"""Kernels of projections and lookups with weights in any form, which call torch.

A tape records each as one call, and gives it ``out``. Those of grouped projections call one of a projection for each
expert with rows, whose number is a value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hal.errors import OperationError
from hal.ops.forms import Form, dequantize
from hal.ops.kernels import torch_kernels
from hal.ops.kernels.kernel_table import Kernel
from hal.ops.kernels.partial_kernel import FormKernels, Takes, plain
from hal.ops.projection import floating_bias

from . import packing
from .capabilities import multiplies_int8, product_dtype
from .description import ANY, Describe, of_rows, torch_in
from .kernels import int8_product, int8_product_in_float32

if TYPE_CHECKING:
    from hal.nn import WeightUse

Forms = Mapping[str, Sequence[tuple[Takes, Kernel, Describe]]]
"""For each operation, kernels, which forms each takes, and its description. The first that takes a form runs."""


def form_kernels(forms: Forms) -> dict[str, Kernel]:
    """Return the kernels by operation."""
    return {name: FormKernels(name, [(takes, kernel) for takes, kernel, _ in each]) for name, each in forms.items()}


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


PACKED_ROWS = 32
"""Maximum number of rows for which torch's product with an int8 weight is faster than converting the weight."""


class Widen(Protocol):
    """A function that widens rows of a weight, as :func:`widened` does."""

    def __call__(
        self, form: Form, weight: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype, start: int, end: int
    ) -> Tensor:
        """Return the rows from ``start``, the first of a block, to ``end``, ``[end - start, in_features]``."""


def widened(
    form: Form, weight: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype, start: int, end: int
) -> Tensor:
    """Return scaled rows of a weight in a dtype."""
    scale, zero = blocks_of(form, scale, start, end), None if zero is None else blocks_of(form, zero, start, end)
    return dequantize(form, weight[start:end], scale, zero).to(dtype)


def blocks_of(form: Form, factors: Tensor, start: int, end: int) -> Tensor:
    """Return the scales or zero points of some rows of a weight, from those of all."""
    return factors[start // form.rows : -(-end // form.rows)] if form.rows else factors


def linear(
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
    widen: Widen = widened,
) -> Tensor:
    """See :func:`hal.ops.linear`. It widens some rows at a time, in the dtype of the product."""
    bias = floating_bias(bias, weight_scale, form)
    if rounded(x, x_scale, dtype):

        def product(x: Tensor, bias: Tensor | None) -> Tensor:
            return linear(x, weight, bias, weight_scale, weight_zero_point, None, None, form, widen=widen)

        return scaled(product, x, bias, x_scale, dtype or x.dtype, out)

    def rows_of(start: int, end: int, dtype: torch.dtype) -> Tensor:
        return widen(form, weight, weight_scale, weight_zero_point, dtype, start, end)

    return packing.by_rows(x, weight.shape[0], form.rows or 1, rows_of, bias, out)


def rounded(x: Tensor, x_scale: Tensor | None, dtype: torch.dtype | None) -> bool:
    """Return whether x has been rounded, and is multiplied by :func:`scaled`."""
    return x_scale is not None or dtype not in (None, x.dtype)


def scaled(
    product: Callable[[Tensor, Tensor | None], Tensor],
    x: Tensor,
    bias: Tensor | None,
    x_scale: Tensor | None,
    dtype: torch.dtype,
    out: Tensor | None,
) -> Tensor:
    """Return a product of rounded inputs, computed in float32; of bfloat16, in which float8 is exact, in that dtype.

    Args:
        product: returns the product of x and the weight, and adds a bias.
        x: see :func:`hal.ops.linear`, as the next ones.
        bias: broadcast to the result.
        x_scale: None of a static input.
        dtype: that of the result.
        out: where to write it; None for a new tensor.
    """
    given = x if x.dtype is torch.bfloat16 else x.float()
    values = product(given, bias if x_scale is None else None).float()
    if x_scale is not None:
        values.mul_(x_scale.unsqueeze(-1))
        if bias is not None:
            values += bias
    return values.to(dtype) if out is None else out.copy_(values)


def input_dtype(use: WeightUse) -> torch.dtype:
    """Return the dtype of x in products of forms that are not exact."""
    exact = use.form.inputs == "float" or (use.form.inputs.endswith("float8") and use.dtype is torch.bfloat16)
    return use.dtype if exact else torch.float32


def describe(weight: Tensor, use: WeightUse) -> str:
    """Return who multiplies in :func:`linear`."""
    return torch_in(product_dtype(input_dtype(use)), "widened")


def _packs_int8(dtype: torch.dtype, width: int) -> bool:
    """Return whether torch has a product with an int8 weight. It reads 16 columns at a time, past the end of others."""
    return dtype is torch.bfloat16 and width % 16 == 0


def _describe_few_int8(weight: Tensor, use: WeightUse) -> str:
    few = PACKED_ROWS if _packs_int8(use.dtype, weight.shape[-1]) else 0
    return of_rows((torch_in(weight.dtype, "not widened"), few), (describe(weight, use), ANY))


def few_int8(
    x: Tensor, weight: Tensor, bias: Tensor | None, weight_scale: Tensor, *given: Any, out: Tensor | None = None
) -> Tensor:
    """See :func:`hal.ops.linear`. In bfloat16, few rows read the int8 weight directly, and scales are rounded."""
    rows, dtype = x.reshape(-1, weight.shape[1]), given[-2] or x.dtype
    if x.dtype is not dtype or not _packs_int8(dtype, weight.shape[1]) or not 0 < rows.shape[0] <= PACKED_ROWS:
        return linear(x, weight, bias, weight_scale, *given, out=out)
    values = torch._weight_int8pack_mm(rows.contiguous(), weight, weight_scale.view(-1).to(x.dtype))
    values = values.view(*x.shape[:-1], -1)
    values = values if bias is None else (values + bias).to(x.dtype)
    return values if out is None else out.copy_(values)


@functools.cache
def _integer_linear() -> Callable[..., Tensor]:
    return torch_kernels.integer_linear(int8_product if multiplies_int8() else int8_product_in_float32)


def describe_exact(weight: Tensor, use: WeightUse) -> str:
    """Return who multiplies in :func:`exact_linear`."""
    return torch_in(torch.int8 if multiplies_int8() else torch.float32)


def exact_linear(*given: Any, out: Tensor | None = None) -> Tensor:
    """See :func:`hal.ops.linear`, of forms whose sums are exact."""
    *tensors, dtype, form = given
    if out is None:
        return _integer_linear()(*tensors, dtype, form)
    return out.copy_(_integer_linear()(*tensors, torch.float32, form))


def embedding(*given: Any, out: Tensor | None = None) -> Tensor:
    """See :func:`hal.ops.embedding`."""
    rows = torch_kernels.embedding(*given)
    return rows if out is None else out.copy_(rows)


def _float_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any, out: Tensor | None = None) -> Tensor:
    return packing.linear(x, weight, bias, out=out)


def _every(form: Form) -> bool:
    return True


def _torch(weight: Tensor, use: WeightUse) -> str:
    return "torch"


exact: Takes = attrgetter("exact")
LINEAR: Sequence[tuple[Takes, Kernel, Describe]] = (
    (plain, _float_linear, lambda weight, use: of_rows(*packing.products(weight))),
    (exact, exact_linear, describe_exact),
    (lambda form: form == Form("int8"), few_int8, _describe_few_int8),
    (_every, linear, describe),
)
KERNELS: Forms = {
    "embedding": ((plain, torch_kernels.embedding, _torch), (_every, embedding, _torch)),
    "grouped_linear": tuple((takes, by_expert(kernel), how) for takes, kernel, how in LINEAR),
    "linear": LINEAR,
}
