"""Kernels made of torch's own functions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hal import ops
from hal.ops.kernels import torch_kernels
from hal.ops.kernels.kernel_table import Kernel
from hal.ops.quantization import accumulated

FEWEST_ROWS, MULTIPLE = 17, 8
"""That cuBLAS takes of an int8 matrix, as torch's _int_mm checks: rows of the left one; the other sides' divisor."""


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` in int32, exactly: by cuBLAS where it takes the weight, else as the references do."""
    out_features, width = weight.shape
    if out_features % MULTIPLE or width % MULTIPLE or not weight.numel():
        return accumulated(x, weight)
    rows = x.reshape(-1, width)
    count = rows.shape[0]
    if not count:
        return x.new_empty(*x.shape[:-1], out_features, dtype=torch.int32)
    if count < FEWEST_ROWS:
        # Up to a multiple of 8 as well, as some releases of cuBLAS want.
        rows = functional.pad(rows, (0, 0, 0, FEWEST_ROWS + MULTIPLE - 1 - count))
    return torch._int_mm(rows.contiguous(), weight.t())[:count].view(*x.shape[:-1], out_features)


KERNELS: dict[str, Kernel] = {
    **torch_kernels.KERNELS,
    **torch_kernels.int8_projections(int8_product),
    # Made of torch's sort and of elementwise functions, without a wait for the GPU. A library that draws by a generator
    # of its own is no kernel of it: the operation's draw depends on seed, step and token only.
    "sample": ops.operation("sample").reference,
}
"""By operation. Attention is in a module of its own."""
