"""Rewrites from the overloads that spell norms, activations and experts out, as in transformers' decoders.

Each has a pattern in plain torch. In 16 bits transformers rounds in between, and hal's operations once, so both sides
agree within the operation's tolerance.

The experts' products are those over consecutive rows of one expert, which transformers calls ``grouped_mm``. A loop
over the experts that occur depends on the tokens, so Dynamo splits the graph there, and nothing is recognized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

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


def _of_batches(split: Callable[..., Any]) -> Callable[..., _Split]:
    """Return a split whose values keep a batch and a length."""

    def batched(
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
        query, key, value = split(qkv, q_weight, k_weight, cos, sin, eps, num_heads, num_kv_heads)
        return query, key, value.unflatten(0, (batch, -1))

    return batched


def _batched_split_samples(draw: Draw) -> Iterator[Sample]:
    for sample in _SPLIT.samples(draw):
        tokens = sample[0].shape[0]
        yield *sample, 3 if tokens % 3 == 0 else tokens


batched_split = Rewrite(
    "split_qkv_rmsnorm_rope_of_batches",
    _of_batches(lambda *given: of_operation(_SPLIT).pattern(*given)),
    _of_batches(hal.split_qkv_rmsnorm_rope.default),
    _batched_split_samples,
    axes={name: axes for name, axes in _SPLIT.axes.items() if name != "return"},
    dtypes={name: dtypes for name, dtypes in _SPLIT.dtypes.items() if name != "return"},
)
"""The rewrite of the fused operation for values that keep a batch and a length, as transformers' do."""


Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of rows, weights ``[num_experts, in_features, out_features]``, and the end of the rows of each expert."""

PRODUCTS = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")
"""The overloads of the product by their names in torch.library; a library that is not imported has none."""


def products() -> Iterator[tuple[str, Product]]:
    """Yield the registered overloads of the product, with their names."""
    for name in PRODUCTS:
        namespace, _, operator = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        if packet is not None:
            yield operator.strip("_"), packet.default


def _route(name: str, *, renormalize: bool, rounded: bool) -> Rewrite:
    """Return the rewrite of a router.

    Args:
        name: of the rewrite.
        renormalize: whether the weights are divided by their sum.
        rounded: whether the logits and the weights have 16 bits. Else both have float32, as the logits have that a
            router converts first.
    """

    def spelled(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        weights, experts = (logits.float() if rounded else logits).softmax(-1).topk(top_k, dim=-1)
        if renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(logits.dtype) if rounded else weights, experts

    def operation(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        weights, experts = hal.topk_route.default(logits, None, top_k, False, renormalize, 1.0, 1, 1, 1)
        return weights, experts.long()

    def samples(draw: Draw) -> Iterator[Sample]:
        for tokens, experts, top_k in ((1, 8, 2), (17, 64, 7), (5, 6, 3)):
            yield draw.normal(tokens, experts).to(dtypes[0]), top_k

    dtypes = (torch.bfloat16, torch.float16) if rounded else (torch.float32,)
    return Rewrite(name, spelled, operation, samples, axes={"logits": "tokens num_experts"}, dtypes={"logits": dtypes})


routings = (
    _route("topk_route_of_16_bits", renormalize=True, rounded=True),
    _route("topk_route", renormalize=True, rounded=False),
    _route("topk_route_of_16_bits_unnormalized", renormalize=False, rounded=True),
    _route("topk_route_unnormalized", renormalize=False, rounded=False),
)
"""In this order, because the structure of each is a part of one before it."""


def _grouped(product: Product) -> Callable[..., Tensor]:
    def spelled(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        tokens, top_k = experts.shape
        ordered, order = torch.sort(experts.reshape(-1))
        rows, factors = x[order // top_k], weights.reshape(-1)[order]
        counted = ordered.float() if x.device.type == "cpu" else ordered.int()
        counts = torch.histc(counted, bins=gate_up.shape[0], min=0, max=gate_up.shape[0] - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = product(rows, gate_up.transpose(-2, -1), ends).chunk(2, dim=-1)
        output = product(functional.silu(gate) * up, down.transpose(-2, -1), ends) * factors.unsqueeze(-1)
        places = torch.empty_like(order)
        places[order] = torch.arange(order.shape[0], device=x.device)
        return output[places].view(tokens, top_k, -1).sum(dim=1).to(x.dtype)

    return spelled


def _operations(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    # The body of expert_mlp, into which a rewrite fuses them if the driver has its kernel.
    rows, counts, positions = hal.expert_permute.default(x, experts.int(), gate_up.shape[0])
    activated = hal.silu_and_mul.default(hal.grouped_linear.default(rows, gate_up, counts))
    output = hal.grouped_linear.default(activated, down, counts)
    return hal.expert_unpermute.default(output, positions, weights)  # type: ignore[no-any-return]


def _experts_samples(draw: Draw) -> Iterator[Sample]:
    rounded = Draw(torch.bfloat16, draw.device)  # the one dtype that every overload supports
    for x, gate_up, down, weights, experts, *others in ops.operation("expert_mlp").samples(rounded):
        if x.shape[0] and others == [None, None, ops.GatedActivation()]:
            yield x, gate_up, down, weights, experts.long()
            yield x, gate_up, down, weights.float(), experts.long()


def grouped_experts() -> tuple[Rewrite, ...]:
    """Return a rewrite for each registered overload of the product."""
    return tuple(_of_product(name, product) for name, product in products())


_known: dict[str, Rewrite] = {}


def _of_product(name: str, product: Product) -> Rewrite:
    if name not in _known:
        _known[name] = Rewrite(
            f"experts_of_{name}",
            _grouped(product),
            _operations,
            _experts_samples,
            axes={
                "x": "tokens hidden",
                "gate_up": "num_experts merged hidden",
                "down": "num_experts hidden merged//2",
                "weights": "tokens top_k",
                "experts": "tokens top_k",
            },
            dtypes={
                "x": FLOATING,
                "gate_up": "x",
                "down": "x",
                "weights": ("x", torch.float32),
                "experts": torch.int64,
            },
        )
    return _known[name]
