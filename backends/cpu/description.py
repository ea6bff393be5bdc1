"""Descriptions of kernels, which ``hal explain`` and ``hal doctor`` print."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hal.nn import WeightUse

ANY = sys.maxsize
"""A number of rows that no product exceeds."""
Describe = Callable[[Tensor, "WeightUse"], str]
"""Returns the kernel of a prepared weight, as :meth:`hal.Backend.describe_kernel`."""


def of_rows(*kernels: tuple[str, int]) -> str:
    """Return which kernel serves up to how many rows: ``C++ up to 16 rows, then torch``, from the most rows of each."""
    texts, before = [], 0
    for name, most in kernels:
        if most > before:
            texts.append(name if most == ANY else f"{name} up to {most} {'row' if most == 1 else 'rows'}")
            before = most
    return ", then ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def torch_in(dtype: torch.dtype, *details: str) -> str:
    """Return the name of torch's product in a dtype."""
    return f"torch ({', '.join((str(dtype).removeprefix('torch.'), *details))})"
