"""torch's functions as kernels: which function computes each operation. Triton kernels are in triton/."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hal import ops
from hal.ops.kernels import composed_attention, composed_recurrence, torch_kernels
from hal.ops.kernels.form_kernels import FormKernels, plain
from hal.ops.kernels.kernel_table import Kernel
from hal.ops.projection import int8_matmul

from .attention import capturing, dense

MIN_ROWS, MULTIPLE = 17, 8
"""torch._int_mm's limits: the minimum rows of the left matrix, and the divisor of its other dimensions."""


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T`` in int32, from cuBLAS if it supports the weight, otherwise from the reference."""
    out_features, width = weight.shape
    if out_features % MULTIPLE or width % MULTIPLE or not weight.numel():
        return int8_matmul(x, weight)
    rows = x.reshape(-1, width)
    count = rows.shape[0]
    if not count:
        return x.new_empty(*x.shape[:-1], out_features, dtype=torch.int32)
    if count < MIN_ROWS:
        # Padded to a multiple of 8, which some releases of cuBLAS require.
        rows = functional.pad(rows, (0, 0, 0, MIN_ROWS + MULTIPLE - 1 - count))
    return torch._int_mm(rows.contiguous(), weight.t())[:count].view(*x.shape[:-1], out_features)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    query_start_loc_host: Tensor,
    scale: float,
    causal: bool,
) -> Tensor:
    """See :func:`hal.ops.packed_attention`. A capture runs the reference, because the calls depend on the lengths."""
    arguments = query, key, value, query_start_loc, query_start_loc_host, scale, causal
    if capturing(query):
        found: Tensor = ops.operation("packed_attention").reference(*arguments)
        return found
    return composed_attention.packed(*arguments)


LINEAR = FormKernels(
    "linear",
    [(plain, torch_kernels.linear), (lambda form: form.exact, torch_kernels.integer_linear(int8_product))],
    otherwise=torch_kernels.linear,
)
"""cuBLAS multiplies by floating-point and int8 weights themselves, and by others once they are widened."""
KERNELS: dict[str, Kernel] = {
    **torch_kernels.KERNELS,
    **composed_recurrence.KERNELS,
    # torch's sort and elementwise functions, without a wait for the GPU. A library with its own random generator cannot
    # implement it: the operation's draw depends only on seed, step and token.
    "sample": ops.operation("sample").reference,
    "linear": LINEAR,
    "packed_attention": packed_attention,
    "scaled_dot_product_attention": dense,
}
"""Kernels by operation. Attention over the paged cache is in attention.py."""
