"""Mixtures of experts in W8A8, static and dynamic."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import fused_op
from hal.ops.experts.grouped import grouped_linear
from hal.ops.experts.routing import ROUTINGS, expert_permute, expert_unpermute, routing
from hal.ops.form_samples import INT8_DYNAMIC, INT8_STATIC
from hal.ops.quantization import (
    ROUNDED_BEFORE,
    dynamic_quantize,
    quantize,
    silu_and_mul_dynamic_quantize,
    silu_and_mul_quantize,
)

SCALES = (torch.float32, torch.bfloat16)
"""Dtypes of weights' scales: float32, or bfloat16 where a driver prepared them so."""


def _routed(draw: Draw) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Yield x, both weights and their scales, and the routing."""
    for (tokens, num_experts, top_k), (hidden, width) in zip(
        ROUTINGS, ((64, 48), (32, 96), (48, 16), (16, 24), (80, 32)), strict=True
    ):
        sizes = (2 * width, hidden), (hidden, width)
        weights = [draw.integers(-127, 128, num_experts, *size, dtype=torch.int8) for size in sizes]
        scales = [
            draw.integers(50, 200, num_experts, out, 1).float() * 1e-2 / 127 * width**-0.5 for out, width in sizes
        ]
        x, scores = draw.normal(tokens, hidden), draw.normal(tokens, top_k).abs()
        yield (
            x,
            weights[0],
            scales[0],
            weights[1],
            scales[1],
            scores.float() if top_k == 4 else scores,
            routing(draw, tokens, num_experts, top_k),
        )


QUANT_MLP = {torch.float32: (1e-2, 3e-2), torch.bfloat16: (3e-2, 8e-2), torch.float16: (1.2e-2, 4e-2)}
"""Tolerance of an MLP whose activations between the products may be off by one."""


def _mlp_dynamic_samples(draw: Draw) -> Iterator[Sample]:
    yield from _routed(draw)


@fused_op(
    samples=_mlp_dynamic_samples,
    axes={
        "x": "tokens hidden",
        "gate_up": "num_experts merged hidden",
        "gate_up_scale": "num_experts merged 1",
        "down": "num_experts hidden merged//2",
        "down_scale": "num_experts hidden 1",
        "weights": "tokens top_k",
        "experts": "tokens top_k",
        "return": "tokens hidden",
    },
    dtypes={
        "x": FLOATING,
        "gate_up": torch.int8,
        "gate_up_scale": SCALES,
        "down": torch.int8,
        "down_scale": SCALES,
        "weights": ("x", torch.float32),
        "experts": torch.int32,
        "return": "x",
    },
    rowwise="tokens",
    tolerance=QUANT_MLP,
    off_by_one=ROUNDED_BEFORE,
)
def quant_expert_mlp_dynamic(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    weights: Tensor,
    experts: Tensor,
) -> Tensor:
    """Return the weighted sum of the gated MLPs of each token's experts, in W8A8 with scales per token.

    Args:
        x: ``[tokens, hidden]``, floating.
        gate_up: ``[num_experts, 2 * width, hidden]``, int8, in the layout that the driver prepared.
        gate_up_scale: ``[num_experts, 2 * width, 1]``, float32, or as the driver prepared it.
        down: ``[num_experts, hidden, width]``, int8, in the layout that the driver prepared.
        down_scale: ``[num_experts, hidden, 1]``, float32, or as the driver prepared it.
        weights: ``[tokens, top_k]``, of x's dtype, or float32.
        experts: ``[tokens, top_k]``, int32, from 0 to ``num_experts - 1``.

    Returns:
        ``[tokens, hidden]``, of x's dtype.
    """
    rows, counts, positions = expert_permute(x, experts, gate_up.shape[0])
    quantized, scale = dynamic_quantize(rows)
    merged = grouped_linear(quantized, gate_up, counts, None, gate_up_scale, None, scale, x.dtype, INT8_DYNAMIC)
    quantized, scale = silu_and_mul_dynamic_quantize(merged)
    output = grouped_linear(quantized, down, counts, None, down_scale, None, scale, x.dtype, INT8_DYNAMIC)
    return expert_unpermute(output, positions, weights)


def _mlp_static_samples(draw: Draw) -> Iterator[Sample]:
    for x, gate_up, gate_up_scale, down, down_scale, weights, experts in _routed(draw):
        inputs = [
            (
                draw.tensor([step], torch.float32).expand(size).contiguous(),
                draw.tensor([-7], torch.int32).expand(size).contiguous(),
            )
            for step, size in ((0.03125, gate_up.shape[2]), (0.0625, down.shape[2]))
        ]
        for bias in (False, True):
            (scale, offset), (down_input, down_offset) = inputs
            if not bias:  # the other form of a scale
                scale, down_input = scale[:1].clone(), down_input[:1].clone()
            biases = [
                draw.integers(-500, 500, *each.shape[:2], dtype=torch.int32) if bias else None
                for each in (gate_up_scale, down_scale)
            ]
            yield (
                x,
                scale,
                offset if bias else None,
                gate_up,
                gate_up_scale * 0.03125,
                biases[0],
                down_input,
                down_offset if bias else None,
                down,
                down_scale * 0.0625,
                biases[1],
                weights,
                experts,
            )


@fused_op(
    samples=_mlp_static_samples,
    axes={
        "x": "tokens hidden",
        "scale": "channels=1|hidden",
        "offset": "channels",
        "gate_up": "num_experts merged hidden",
        "gate_up_scale": "num_experts merged 1",
        "gate_up_bias": "num_experts merged",
        "down_input_scale": "down_channels=1|merged//2",
        "down_input_offset": "down_channels",
        "down": "num_experts hidden merged//2",
        "down_scale": "num_experts hidden 1",
        "down_bias": "num_experts hidden",
        "weights": "tokens top_k",
        "experts": "tokens top_k",
        "return": "tokens hidden",
    },
    dtypes={
        "x": FLOATING,
        "scale": torch.float32,
        "offset": torch.int32,
        "gate_up": torch.int8,
        "gate_up_scale": SCALES,
        "gate_up_bias": torch.int32,
        "down_input_scale": torch.float32,
        "down_input_offset": torch.int32,
        "down": torch.int8,
        "down_scale": SCALES,
        "down_bias": torch.int32,
        "weights": ("x", torch.float32),
        "experts": torch.int32,
        "return": "x",
    },
    rowwise="tokens",
    tolerance=QUANT_MLP,
    off_by_one=ROUNDED_BEFORE,
)
def quant_expert_mlp_static(
    x: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_bias: Tensor | None,
    down_input_scale: Tensor,
    down_input_offset: Tensor | None,
    down: Tensor,
    down_scale: Tensor,
    down_bias: Tensor | None,
    weights: Tensor,
    experts: Tensor,
) -> Tensor:
    """Return the weighted sum of the gated MLPs of each token's experts, in W8A8 with fixed activation scales.

    Args:
        x: ``[tokens, hidden]``, floating.
        scale: as in :func:`quantize`, for x.
        offset: as in :func:`quantize`, for x.
        gate_up: ``[num_experts, 2 * width, hidden]``, int8, in the layout that the driver prepared.
        gate_up_scale: ``[num_experts, 2 * width, 1]``, which includes the scale of x.
        gate_up_bias: ``[num_experts, 2 * width]``, int32, or None.
        down_input_scale: as in :func:`quantize`, for the activations.
        down_input_offset: as in :func:`quantize`, for the activations.
        down: ``[num_experts, hidden, width]``, int8, in the layout that the driver prepared.
        down_scale: ``[num_experts, hidden, 1]``, which includes the scale of the activations.
        down_bias: ``[num_experts, hidden]``, int32, or None.
        weights: ``[tokens, top_k]``, of x's dtype, or float32.
        experts: ``[tokens, top_k]``, int32, from 0 to ``num_experts - 1``.

    Returns:
        ``[tokens, hidden]``, of x's dtype.
    """
    rows, counts, positions = expert_permute(x, experts, gate_up.shape[0])
    quantized = quantize(rows, scale, offset)
    merged = grouped_linear(quantized, gate_up, counts, gate_up_bias, gate_up_scale, None, None, x.dtype, INT8_STATIC)
    activated = silu_and_mul_quantize(merged, down_input_scale, down_input_offset)
    output = grouped_linear(activated, down, counts, down_bias, down_scale, None, None, x.dtype, INT8_STATIC)
    return expert_unpermute(output, positions, weights)
