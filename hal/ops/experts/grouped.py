"""The experts' projections, and their gated MLP."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from hal.ops.activation import GatedActivation, clipped_silu_and_mul, gelu_and_mul, silu_and_mul
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import fused_op, op
from hal.ops.declaration.samples import Draw, Sample
from hal.ops.experts.routing import ROUTINGS, expert_permute, expert_unpermute, routing


def split_rows(draw: Draw, rows: int, num_experts: int) -> Tensor:
    """Return random numbers of rows per expert that add up to ``rows``, int64 ``[num_experts]``."""
    experts = draw.integers(0, num_experts, rows)
    return (experts.unsqueeze(-1) == torch.arange(num_experts, device=draw.device)).sum(0)


BIAS = ("x", torch.float32)
"""The dtypes of a bias of experts: that of x, and that in which drivers may prepare it."""
GROUPED = ((1, 3, 64, 96), (17, 8, 128, 64), (0, 2, 32, 16), (40, 4, 48, 80))
"""Rows, experts, in_features and out_features."""


def _grouped_samples(draw: Draw) -> Iterator[Sample]:
    for rows, experts, width, out in GROUPED:
        weight, bias = draw.normal(experts, out, width, scale=width**-0.5), draw.normal(experts, out)
        counts = split_rows(draw, rows, experts)
        yield draw.normal(rows, width), weight, counts, None
        yield draw.normal(rows, width), weight, counts, bias
    yield draw.normal(40, 48), weight, draw.tensor([0, 40, 0, 0], torch.int64), None
    yield draw.normal(48, 40).t(), weight, draw.tensor([10, 0, 0, 30], torch.int64), bias  # no unit stride


@op(
    samples=_grouped_samples,
    axes={
        "x": "assignments in_features",
        "weight": "num_experts out_features in_features",
        "counts": "num_experts",
        "bias": "num_experts out_features",
        "return": "assignments out_features",
    },
    dtypes={"x": FLOATING, "weight": "x", "counts": torch.int64, "bias": BIAS, "return": "x"},
    rowwise=None,
    weights=("weight", "bias"),
)
def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """Project consecutive rows with one weight per expert: ``x[rows of e] @ weight[e].T + bias[e]``.

    Accumulated in float32 and rounded to x's dtype.

    Args:
        x: ``[assignments, in_features]``, floating, sorted by expert.
        weight: ``[num_experts, out_features, in_features]``, of x's dtype, in the layout that the driver prepared.
        counts: ``[num_experts]``, int64: the number of rows of each expert. Their sum is at most the number of rows.
        bias: ``[num_experts, out_features]``, of x's dtype, or float32 if the driver prepared it; or None.

    Returns:
        ``[assignments, out_features]``, of x's dtype. Rows beyond the sum of the counts are unspecified.
    """
    owner = row_experts(x, counts)
    output = x.new_zeros(x.shape[0], weight.shape[1])
    for expert in range(weight.shape[0]):
        product = functional.linear(x, weight[expert], None if bias is None else bias[expert].to(x.dtype))
        output = torch.where(owner == expert, product, output)
    return output


def row_experts(x: Tensor, counts: Tensor) -> Tensor:
    """Return the expert of each row of x, int64 ``[rows, 1]``."""
    rows = torch.arange(x.shape[0], device=x.device)
    owner: Tensor = (rows.unsqueeze(-1) >= counts.cumsum(0)).sum(-1, keepdim=True)
    return owner


def _mlp_samples(draw: Draw) -> Iterator[Sample]:
    for (tokens, num_experts, top_k), (hidden, width) in zip(
        ROUTINGS, ((64, 48), (32, 96), (48, 16), (16, 24), (80, 32)), strict=True
    ):
        given = (
            draw.normal(tokens, hidden),
            draw.normal(num_experts, 2 * width, hidden, scale=hidden**-0.5),
            draw.normal(num_experts, hidden, width, scale=width**-0.5),
            draw.normal(tokens, top_k).abs(),
            routing(draw, tokens, num_experts, top_k),
        )
        biases = draw.normal(num_experts, 2 * width), draw.normal(num_experts, hidden)
        yield *given, None, None, GatedActivation()
        yield *given[:3], given[3].float(), given[4], None, None, GatedActivation("tanh")
        yield *given, *biases, GatedActivation(alpha=1.702, limit=1.5, interleaved=True)
        yield *given, *biases, GatedActivation(alpha=1.0, limit=7.0)


@fused_op(
    samples=_mlp_samples,
    axes={
        "x": "tokens hidden",
        "gate_up": "num_experts merged hidden",
        "down": "num_experts hidden merged//2",
        "weights": "tokens top_k",
        "experts": "tokens top_k",
        "gate_up_bias": "num_experts merged",
        "down_bias": "num_experts hidden",
        "return": "tokens hidden",
    },
    dtypes={
        "x": FLOATING,
        "gate_up": "x",
        "down": "x",
        "weights": ("x", torch.float32),
        "experts": torch.int32,
        "gate_up_bias": BIAS,
        "down_bias": BIAS,
        "return": "x",
    },
    rowwise="tokens",
    tolerance={torch.bfloat16: (2e-2, 3e-2), torch.float16: (4e-3, 4e-3)},
)
def expert_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: GatedActivation,
) -> Tensor:
    """Return the weighted sum of the gated MLPs of each token's experts.

    Each product, and the activation between them, is rounded to x's dtype; a kernel may keep more bits.

    Args:
        x: ``[tokens, hidden]``, floating.
        gate_up: ``[num_experts, 2 * width, hidden]``, of x's dtype, in the layout that the driver prepared.
        down: ``[num_experts, hidden, width]``, of x's dtype, in the layout that the driver prepared.
        weights: ``[tokens, top_k]``, of x's dtype, or float32.
        experts: ``[tokens, top_k]``, int32, from 0 to ``num_experts - 1``.
        gate_up_bias: ``[num_experts, 2 * width]``, as in :func:`grouped_linear`, or None.
        down_bias: ``[num_experts, hidden]``, as in :func:`grouped_linear`, or None.
        activation: the activation between the products.

    Returns:
        ``[tokens, hidden]``, of x's dtype.
    """
    rows, counts, positions = expert_permute(x, experts, gate_up.shape[0])
    merged = grouped_linear(rows, gate_up, counts, gate_up_bias)
    activated = activation.apply(merged, silu_and_mul, gelu_and_mul, clipped_silu_and_mul)
    return expert_unpermute(grouped_linear(activated, down, counts, down_bias), positions, weights)
