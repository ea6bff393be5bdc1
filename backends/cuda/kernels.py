"""Kernels made of torch's own functions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hal import ops
from hal.ops.declaration import Kernel

FEWEST_ROWS, MULTIPLE = 17, 8
"""That cuBLAS takes of an int8 matrix, as torch's _int_mm checks: rows of the left one; the other sides' divisor."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """torch's own, which also computes in float32 and rounds once."""
    return functional.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Two launches."""
    hidden = x + residual
    return functional.rms_norm(hidden, weight.shape, weight, eps), hidden


def greedy_sample(logits: Tensor) -> Tensor:
    """torch documents that argmax takes the first of equal values."""
    return logits.argmax(-1)


def store_kv_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """index_copy_ moves whole rows, where index_put_ would move elements."""
    slots = slot_mapping.long()
    key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, slots, key)
    value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, slots, value)


def quant_linear_static(
    x: Tensor, weight: Tensor, deq_scale: Tensor, quant_bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """By cuBLAS's product of int8 matrices where it takes them, else the reference."""
    if not _multiplies(weight):
        return ops.operation("quant_linear_static").reference(x, weight, deq_scale, quant_bias, dtype)  # type: ignore[no-any-return]
    sums = int8_product(x, weight)
    if quant_bias is not None:
        sums = sums + quant_bias
    return (sums * deq_scale).to(dtype)


def quant_linear_dynamic(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Likewise."""
    if not _multiplies(weight):
        reference = ops.operation("quant_linear_dynamic").reference
        return reference(x, x_scale, weight, weight_scale, bias, dtype)  # type: ignore[no-any-return]
    values = (int8_product(x, weight) * weight_scale).mul_(x_scale.unsqueeze(-1))
    if bias is not None:
        values += bias
    return values.to(dtype)


def _multiplies(weight: Tensor) -> bool:
    return weight.shape[0] % MULTIPLE == 0 and weight.shape[1] % MULTIPLE == 0 and weight.numel() > 0


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` in int32, exactly, of int8 ``[..., in_features]`` and ``[out_features, in_features]``."""
    out_features, width = weight.shape
    rows = x.reshape(-1, width)
    count = rows.shape[0]
    if not count:
        return x.new_empty(*x.shape[:-1], out_features, dtype=torch.int32)
    if count < FEWEST_ROWS:
        # Up to a multiple of 8 as well, as some releases of cuBLAS want.
        rows = functional.pad(rows, (0, 0, 0, FEWEST_ROWS + MULTIPLE - 1 - count))
    return torch._int_mm(rows.contiguous(), weight.t())[:count].view(*x.shape[:-1], out_features)


KERNELS: dict[str, Kernel] = {
    "add_rms_norm": add_rms_norm,
    "embedding": functional.embedding,
    "greedy_sample": greedy_sample,
    "linear": functional.linear,
    "quant_linear_dynamic": quant_linear_dynamic,
    "quant_linear_static": quant_linear_static,
    "rms_norm": rms_norm,
    # Made of torch's sort and of elementwise functions, without a wait for the GPU. A library that draws by a generator
    # of its own is no kernel of it: the operation's draw depends on seed, step and token only.
    "sample": ops.operation("sample").reference,
    "store_kv_cache": store_kv_cache,
}
"""By operation. Attention is in a module of its own."""
