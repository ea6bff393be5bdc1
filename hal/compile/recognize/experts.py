"""Rewrites from the overloads that spell a mixture of experts out: the choice of experts, and their gated MLP.

The experts' products are those over consecutive rows of one expert, which transformers calls ``grouped_mm``. A loop
over the experts that occur depends on the tokens, so Dynamo splits the graph there, and nothing is recognized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from hal import ops
from hal.compile.rewrite.rewrite import Rewrite
from hal.ops import FLOATING, Draw, Sample

hal = torch.ops.hal

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
