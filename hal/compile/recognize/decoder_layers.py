"""Rewrites from the overloads that spell a norm, a rotation or an activation out, as in transformers' decoders.

Each has a pattern in plain torch. In 16 bits transformers rounds in between, and hal's operations once, so both sides
agree within the operation's tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator

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


rms_norm = Rewrite(
    "rms_norm",
    _norm,
    _norm_operation,
    _norm_samples,
    axes={"x": "... width", "weight": "width"},
    dtypes={"x": FLOATING, "weight": "x"},
)


def _rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return query * cos + _rotate_half(query) * sin, key * cos + _rotate_half(key) * sin


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _rotary_operation(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    batch, _, length, width = query.shape
    rows = [each.transpose(1, 2).reshape(-1, each.shape[1], width) for each in (query, key)]
    angles = [each.expand(batch, length, width).reshape(-1, width) for each in (cos, sin)]
    rotated = hal.rotary_embedding.default(*rows, *angles)
    first, second = (each.view(batch, length, -1, width).transpose(1, 2) for each in rotated)
    return first, second


def _rotary_samples(draw: Draw) -> Iterator[Sample]:
    for batch, heads, kv_heads, length, width in ((3, 8, 2, 5, 64), (1, 3, 1, 6, 32), (2, 4, 4, 1, 128)):
        for rows in {1, batch}:
            angles = draw.normal(rows, length, width // 2).float().repeat(1, 1, 2)
            yield (
                draw.normal(batch, heads, length, width),
                draw.normal(batch, kv_heads, length, width),
                angles.cos().to(draw.dtype),
                angles.sin().to(draw.dtype),
            )


rotary_embedding = Rewrite(
    "rotary_embedding",
    _rotary,
    _rotary_operation,
    _rotary_samples,
    axes={
        "query": "batch num_heads length head_dim",
        "key": "batch num_kv_heads length head_dim",
        "cos": "rows=1|batch length head_dim",
        "sin": "rows=1|batch length head_dim",
    },
    dtypes={"query": FLOATING, "key": "query", "cos": "query", "sin": "query"},
)


def _activation(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


silu_and_mul = Rewrite(
    "silu_and_mul",
    _activation,
    hal.silu_and_mul.default,
    ops.operation("silu_and_mul").samples,
    axes={"x": "... merged"},
    dtypes={"x": FLOATING},
)


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
