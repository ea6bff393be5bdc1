"""Rewrites from the overloads that spell a norm or an activation out, as in transformers' decoders.

Each has a pattern in plain torch. In 16 bits transformers rounds in between, and hal's operations once, so both sides
agree within the operation's tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from hal import ops
from hal.compile.rewrite.rewrite import Rewrite, of_operation
from hal.ops import FLOATING, Draw, Sample

hal = torch.ops.hal


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _norm_operation(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # A norm of heads follows a projection: with tokens as one axis, the fused operations recognize it.
    rows = x.flatten(0, -3) if x.dim() > 3 else x
    normed = hal.rms_norm.default(rows, weight, eps)
    return normed.view(x.shape) if x.dim() > 3 else normed  # type: ignore[no-any-return]


def _norm_samples(draw: Draw) -> Iterator[Sample]:
    for shape in ((1, 5, 96), (7, 64), (2, 3, 4, 80)):
        yield draw.normal(*shape), draw.normal(shape[-1]), 1e-5


def _late_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide).to(x.dtype)


def _narrow_norm_samples(draw: Draw) -> Iterator[Sample]:
    # In float32 nothing is rounded, so both spellings are one.
    narrow = Draw(torch.bfloat16 if draw.dtype is torch.float32 else draw.dtype, draw.device)
    yield from _norm_samples(narrow)


rms_norm = Rewrite(
    "rms_norm",
    _norm,
    _norm_operation,
    _norm_samples,
    axes={"x": "... width", "weight": "width"},
    dtypes={"x": FLOATING, "weight": "x"},
)
late_rms_norm = Rewrite(
    "rms_norm_rounded_late",
    _late_norm,
    _norm_operation,
    _narrow_norm_samples,
    axes={"x": "... width", "weight": "width"},
    dtypes={"x": (torch.bfloat16, torch.float16), "weight": "x"},
)
"""The norm whose weight is applied before the result is rounded, as in gpt-oss and OLMo 2."""


def _gated(name: str, activation: Callable[[Tensor], Tensor], operation: Callable[..., Tensor]) -> Rewrite:
    """Return the rewrite of an activated gate that is multiplied by the other half."""

    def spelled(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return activation(gate) * up

    def samples(draw: Draw) -> Iterator[Sample]:
        yield from ops.operation("silu_and_mul").samples(draw)

    return Rewrite(name, spelled, operation, samples, axes={"x": "... merged"}, dtypes={"x": FLOATING})


silu_and_mul = _gated("silu_and_mul", functional.silu, hal.silu_and_mul.default)
gelu_and_mul = tuple(
    _gated(
        "gelu_and_mul" if approximate == "none" else f"gelu_{approximate}_and_mul",
        partial(functional.gelu, approximate=approximate),
        partial(hal.gelu_and_mul.default, approximate=approximate),
    )
    for approximate in ("none", "tanh")
)
"""With the error function, and with its approximation."""


def _repeated(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    heads = query.shape[1] // key.shape[1]
    key, value = (
        each[:, :, None]
        .expand(each.shape[0], each.shape[1], heads, *each.shape[2:])
        .reshape(each.shape[0], each.shape[1] * heads, *each.shape[2:])
        for each in (key, value)
    )
    return hal.scaled_dot_product_attention.default(query, key, value, mask, scale, causal)  # type: ignore[no-any-return]


def _repeated_samples(draw: Draw) -> Iterator[Sample]:
    # One key head is repeated without a copy, which is another structure.
    for batch, heads, kv_heads, queries, keys, head_dim in (
        (3, 6, 2, 4, 7, 64),
        (1, 8, 4, 1, 5, 32),
        (2, 9, 3, 6, 6, 16),
    ):
        tensors = [
            draw.normal(batch, count, length, head_dim)
            for count, length in ((heads, queries), (kv_heads, keys), (kv_heads, keys))
        ]
        mask = draw.integers(0, 2, batch, 1, queries, keys).bool()
        yield *tensors, mask, 0.25, False
        for causal in (False, True):
            yield *tensors, None, 0.25, causal


repeated_heads = Rewrite(
    "repeated_heads",
    _repeated,
    hal.scaled_dot_product_attention.default,
    _repeated_samples,
    axes={
        "query": "batch num_heads queries head_dim",
        "key": "batch num_kv_heads keys head_dim",
        "value": "batch num_kv_heads keys head_dim",
        "mask": "batch 1 queries keys",
    },
    dtypes={"query": FLOATING, "key": "query", "value": "query", "mask": torch.bool},
)
"""Keys and values that are repeated for every query head: the operation shares them without the copies."""


_SPLIT = ops.operation("split_qkv_rmsnorm_rope")
_Split = tuple[Tensor, Tensor, Tensor]


def _batched_split(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    batch: int,
) -> _Split:
    query, key, value = of_operation(_SPLIT).pattern(qkv, q_weight, k_weight, cos, sin, eps, num_heads, num_kv_heads)
    return query, key, value.unflatten(0, (batch, -1))


def _batched_split_operation(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    batch: int,
) -> _Split:
    query, key, value = hal.split_qkv_rmsnorm_rope.default(
        qkv, q_weight, k_weight, cos, sin, eps, num_heads, num_kv_heads
    )
    return query, key, value.unflatten(0, (batch, -1))


def _batched_split_samples(draw: Draw) -> Iterator[Sample]:
    for sample in _SPLIT.samples(draw):
        tokens = sample[0].shape[0]
        yield *sample, 3 if tokens % 3 == 0 else tokens


batched_split = Rewrite(
    "split_qkv_rmsnorm_rope_of_batches",
    _batched_split,
    _batched_split_operation,
    _batched_split_samples,
    axes={name: axes for name, axes in _SPLIT.axes.items() if name != "return"},
    dtypes={name: dtypes for name, dtypes in _SPLIT.dtypes.items() if name != "return"},
)
"""The rewrite of the fused operation for values that keep a batch and a length, as transformers' do."""
