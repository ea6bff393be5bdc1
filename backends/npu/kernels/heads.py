"""Products of each head with its own matrix: npu_transpose_batchmatmul, whose result has the tokens first.

Source: torch_npu's documentation of ``npu_transpose_batchmatmul``.
"""

from __future__ import annotations

import torch_npu
from torch import Tensor

from hal.ops.kernels import torch_kernels

MULTIPLE, MOST = 16, 65535
"""What the inputs and outputs of a head are multiples of, and the most of each."""
ORDER = [0, 1, 2]
"""That of the factors' dimensions. The operator could also transpose x, for fewer heads and inputs."""


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See :func:`hal.ops.head_linear`."""
    if not x.numel() or any(size % MULTIPLE or size > MOST for size in weight.shape[1:]):
        return torch_kernels.head_linear(x, weight)
    return torch_npu.npu_transpose_batchmatmul(  # type: ignore[no-any-return]
        x.transpose(0, 1), weight, perm_x1=ORDER, perm_x2=ORDER, perm_y=[1, 0, 2]
    )
