"""Ones of each dtype on the NPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def ones_of(dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return a function that returns ones of a shape on the NPU."""
    return lambda *shape: torch.ones(shape, dtype=dtype, device="npu")


half, bf16, f32 = map(ones_of, (torch.float16, torch.bfloat16, torch.float32))
i8, i32, i64 = map(ones_of, (torch.int8, torch.int32, torch.int64))
