"""The experts' projections, with weights in any form, and their gated MLP."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from hal.ops.activation import GatedActivation, clipped_silu_and_mul, gelu_and_mul, silu_and_mul
from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import fused_op, op
from hal.ops.experts.routing import ROUTINGS, expert_permute, expert_unpermute, routing
from hal.ops.form_samples import drawn_bias, drawn_input, drawn_weight, result_dtype, samples_of_forms
from hal.ops.forms import FLOAT, Form, dequantize
from hal.ops.projection import BIAS, SCALES, WEIGHTS, ZERO_POINTS, floating_bias, int8_matmul


def split_rows(draw: Draw, rows: int, num_experts: int) -> Tensor:
    """Return random numbers of rows per expert that add up to ``rows``, int64 ``[num_experts]``."""
    experts = draw.integers(0, num_experts, rows)
    return (experts.unsqueeze(-1) == torch.arange(num_experts, device=draw.device)).sum(0)


GROUPED = ((1, 3, 64, 96), (17, 8, 128, 64), (0, 2, 32, 16), (40, 4, 48, 80))
"""Rows, experts, in_features and out_features."""


def _grouped_samples(draw: Draw) -> Iterator[Sample]:
    none = None, None, None, None, FLOAT
    for rows, experts, width, out in GROUPED:
        weight, bias = draw.normal(experts, out, width, scale=width**-0.5), draw.normal(experts, out)
        counts = split_rows(draw, rows, experts)
        yield draw.normal(rows, width), weight, counts, None, *none
        yield draw.normal(rows, width), weight, counts, bias, *none
    yield draw.normal(40, 48), weight, draw.tensor([0, 40, 0, 0], torch.int64), None, *none
    yield draw.normal(48, 40).t(), weight, draw.tensor([10, 0, 0, 30], torch.int64), bias, *none  # no unit stride
    for form, place, width, out in samples_of_forms():
        rows, experts = ((1, 3), (17, 8), (0, 2), (9, 4), (6, 2), (11, 3))[place]
        weight, scale, zero = drawn_weight(draw, form, experts, out, width, place=place)
        x, x_scale = drawn_input(draw, form, rows, width)
        added = drawn_bias(draw, form, experts, out, place=place)
        counts = split_rows(draw, rows, experts)
        yield x, weight, counts, added, scale, zero, x_scale, result_dtype(draw, x), form


@op(
    samples=_grouped_samples,
    axes={
        "x": "assignments in_features",
        "weight": "num_experts out_features packed",
        "counts": "num_experts",
        "bias": "num_experts out_features",
        "weight_scale": "num_experts row_blocks column_blocks",
        "weight_zero_point": "num_experts row_blocks column_blocks",
        "x_scale": "assignments",
        "return": "assignments out_features",
    },
    dtypes={
        "x": (FLOATING, torch.int8),
        "weight": WEIGHTS,
        "counts": torch.int64,
        "bias": BIAS,
        "weight_scale": SCALES,
        "weight_zero_point": ZERO_POINTS,
        "x_scale": torch.float32,
        "return": (("dtype", "x"),),
    },
    rowwise=None,
    weights=("weight", "bias", "weight_scale", "weight_zero_point"),
    tolerance={torch.bfloat16: (1.6e-2, 1e-2)},
)
def grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    bias: Tensor | None = None,
    weight_scale: Tensor | None = None,
    weight_zero_point: Tensor | None = None,
    x_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    form: Form = FLOAT,
) -> Tensor:
    """Project consecutive rows with one weight per expert: ``x[rows of e] @ weight[e].T + bias[e]``.

    Accumulated and rounded as :func:`linear` does.

    Args:
        x: ``[assignments, in_features]``, as :func:`linear` takes it, sorted by expert.
        weight: ``[num_experts, out_features, in_features]``, or numbers as :func:`linear` takes them; in the layout
            that the driver prepared.
        counts: ``[num_experts]``, int64: the number of rows of each expert. Their sum is at most the number of rows.
        bias: ``[num_experts, out_features]``, as in :func:`linear`, or None.
        weight_scale: ``[num_experts, blocks of rows, blocks of columns]``; None of floating-point weights.
        weight_zero_point: of the same shape; None for 0.
        x_scale: ``[assignments]``, float32; None of an input that is static or not rounded.
        dtype: the dtype of the result; None for that of x.
        form: the form of each expert's weight.

    Returns:
        ``[assignments, out_features]``, of dtype. Rows beyond the sum of the counts are unspecified.
    """
    if weight_scale is None:
        return by_expert(
            x, counts, lambda e: functional.linear(x, weight[e], None if bias is None else bias[e].to(x.dtype))
        )
    if form.exact:
        sums = by_expert(x, counts, lambda e: _integer_sums(x, weight[e], bias, e))
        values = sums.float() * _of_rows(weight_scale.squeeze(-1), x, counts)
        added = None if bias is None or bias.dtype is torch.int32 else bias
    else:
        added = floating_bias(bias, weight_scale, form)
        wide = dequantize(form, weight, weight_scale, weight_zero_point)
        values = by_expert(x, counts, lambda e: functional.linear(x.float(), wide[e]))
    if x_scale is not None:
        values = values * x_scale.unsqueeze(-1)
    if added is not None:
        values = values + _of_rows(added, x, counts)
    return values.to(dtype or x.dtype)


def _integer_sums(x: Tensor, weight: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    sums = int8_matmul(x, weight)
    return sums + bias[expert] if bias is not None and bias.dtype is torch.int32 else sums


def _of_rows(factors: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """Return for each row of x what its expert has."""
    return factors[row_experts(x, counts).squeeze(-1).clamp(max=factors.shape[0] - 1)]


def by_expert(x: Tensor, counts: Tensor, product: Callable[[int], Tensor]) -> Tensor:
    """Return for each row of x that of its expert's product, zeros for rows without an expert."""
    owner, output = row_experts(x, counts), None
    for expert in range(counts.shape[0]):
        found = product(expert)
        output = torch.where(owner == expert, found, torch.zeros_like(found) if output is None else output)
    assert output is not None
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
        "gate_up_bias": ("x", torch.float32),
        "down_bias": ("x", torch.float32),
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
