"""Tests for the fused operations of the emulated CANN, through the real torch_npu, against float64 on the CPU.

A test's id ends in its seed. Refusals are in test_fused_refusals.py, attention in test_attention.py, matrix products in
test_fused_matmul.py, caches in test_fused_cache.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from helpers.thorough import DTYPE, EXHAUSTIVE, thorough
from support.fused_draw import (
    FLOATS,
    HALVES,
    Draw,
    Near,
    Pairs,
    Rounded,
    Same,
    case,
    check,
    optional,
    parameters,
)
from support.fused_references import EPSILON, rms_norm, rope
from torch import Tensor


def total(x1: Tensor, x2: Tensor) -> Tensor:
    """Return the sum rounded to its dtype, as the NPU keeps it before the norm."""
    return (x1.double() + x2.double()).to(x1.dtype)


def rows(draw: Draw, width: int) -> list[int]:
    return [draw.between(1, 5) for _ in range(draw.between(1, 3))] + [width]


@case(*FLOATS, dims=(1, 2))
def norm(draw: Draw, dims: int) -> Pairs:
    shape = rows(draw, draw.between(2, 70))
    x, gamma = draw.normal(*shape), draw.positive(*shape[-min(dims, len(shape) - 1) :])
    y, rstd = torch_npu.npu_rms_norm(draw.strided(x), draw.strided(gamma), EPSILON)
    expected, expected_rstd = rms_norm(x, gamma)
    yield y, Near(expected)
    yield rstd, Near(expected_rstd)
    y, rstd = torch_npu.npu_gemma_rms_norm(draw.strided(x), draw.strided(gamma), EPSILON)
    yield y, Near(rms_norm(x, gamma.double() + 1)[0])
    yield rstd, Near(expected_rstd)


@case(*FLOATS, in_place=(False, True))
def add_norm(draw: Draw, in_place: bool) -> Pairs:
    shape = rows(draw, draw.between(2, 70))
    x1, x2, gamma = draw.normal(*shape), draw.normal(*shape), draw.positive(shape[-1])
    y, x = draw.strided(x1), draw.strided(x2)
    if in_place:
        rstd = torch_npu.npu_add_rms_norm_v2(y, x, gamma.npu(), EPSILON)
    else:
        y, rstd, x = torch_npu.npu_add_rms_norm(y, x, gamma.npu(), EPSILON)
    expected, expected_rstd = rms_norm(total(x1, x2), gamma)
    yield y, Near(expected)
    yield rstd, Near(expected_rstd)
    yield x, Near(total(x1, x2))


@case(*HALVES)
def add_norm_cast(draw: Draw) -> Pairs:
    shape = rows(draw, draw.between(2, 70))
    x1, x2, gamma = draw.normal(*shape), draw.normal(*shape), draw.positive(shape[-1])
    wide, y, rstd, x = torch_npu.npu_add_rms_norm_cast(draw.strided(x1), draw.strided(x2), gamma.npu(), EPSILON)
    expected, expected_rstd = rms_norm(total(x1, x2), gamma)
    yield y, Near(expected)
    yield wide, Same(y.cpu().float())
    yield rstd, Near(expected_rstd)
    yield x, Same(total(x1, x2))


@case(*HALVES, divide=(True, False), second=(False, True), shifted=(False, True), wide=(False, True))
def add_norm_quant(draw: Draw, divide: bool, second: bool, shifted: bool, wide: bool) -> Pairs:
    shape = rows(draw, draw.between(32, 70))
    x1, x2, gamma = draw.normal(*shape), draw.normal(*shape), draw.positive(shape[-1])
    wide = wide or draw.dtype == torch.float16
    kinds = (torch.float32, torch.int32) if wide else (torch.bfloat16, torch.bfloat16)
    scales = [draw.positive(shape[-1], dtype=kinds[0]) for _ in range(2)]
    zeros = [draw.integers(-5, 5, shape[-1], dtype=torch.int32).to(kinds[1]) if shifted else None for _ in range(2)]
    beta = draw.normal(shape[-1]) if shifted else None
    if not divide:
        scales = [scale * 8 for scale in scales]
    y1, y2, x = torch_npu.npu_add_rms_norm_quant(
        draw.strided(x1),
        draw.strided(x2),
        gamma.npu(),
        scales[0].npu(),
        optional(zeros[0]),
        optional(beta),
        scales[1].npu() if second else None,
        optional(zeros[1]) if second else None,
        epsilon=EPSILON,
        div_mode=divide,
    )
    yield x, Same(total(x1, x2))
    normed = rms_norm(total(x1, x2), gamma, beta)[0]
    for y, scale, zero in list(zip((y1, y2), scales, zeros, strict=True))[: 1 + second]:
        quantized = normed / scale.double() if divide else normed * scale.double()
        yield y, Rounded(quantized if zero is None else quantized + zero.double())


@case(*HALVES, smooth=(0, 1, 2), mask=(None, [True, False], [True, True]), shifted=(False, True))
def add_norm_dynamic_quant(draw: Draw, smooth: int, mask: list[bool] | None, shifted: bool) -> Pairs:
    shape = [draw.between(1, 5), *rows(draw, draw.between(2, 70))]
    x1, x2, gamma = draw.normal(*shape), draw.normal(*shape), draw.positive(shape[-1])
    factors = [draw.positive(shape[-1]) if i < smooth and (mask is None or mask[i]) else None for i in range(2)]
    beta = draw.normal(shape[-1]) if shifted else None
    y1, y2, x, scale1, scale2 = torch_npu.npu_add_rms_norm_dynamic_quant(
        draw.strided(x1),
        draw.strided(x2),
        gamma.npu(),
        smooth_scale1=optional(factors[0]),
        smooth_scale2=optional(factors[1]),
        beta=optional(beta),
        epsilon=EPSILON,
        **({} if mask is None else {"output_mask": mask}),
    )
    yield x, Same(total(x1, x2))
    normed = rms_norm(total(x1, x2), gamma, beta)[0]
    wanted = mask or [True, smooth == 2]
    for y, scale, factor, asked in zip((y1, y2), (scale1, scale2), factors, wanted, strict=True):
        if asked:
            values = normed if factor is None else normed * factor.double()
            yield from dynamically_quantized(values, y, scale)


def dynamically_quantized(values: Tensor, y: Tensor, scale: Tensor, largest: int = 127) -> Pairs:
    scales = values.abs().amax(-1) / largest
    yield scale, Near(scales)
    yield y, Rounded(values / scales.unsqueeze(-1), -largest - 1, largest)


@case(*HALVES, shifted=(False, True))
def norm_quant(draw: Draw, shifted: bool) -> Pairs:
    shape = rows(draw, draw.between(32, 70))
    x, gamma, beta = draw.normal(*shape), draw.positive(shape[-1]), draw.normal(shape[-1])
    scale, offset = draw.positive(1) * 20, draw.integers(-9, 9, 1, dtype=torch.int8)
    if not shifted:
        offset.zero_()
    y = torch_npu.npu_rms_norm_quant(draw.strided(x), gamma.npu(), beta.npu(), scale.npu(), offset.npu(), EPSILON)
    yield y, Rounded(rms_norm(x, gamma, beta)[0] * scale.double() + offset.double())


@case(*HALVES, divide=(True, False), each=(True, False))
def norm_quant_v2(draw: Draw, divide: bool, each: bool) -> Pairs:
    shape = rows(draw, draw.between(32, 70))
    x, gamma, beta = draw.normal(*shape), draw.positive(shape[-1]), draw.normal(shape[-1])
    scale = draw.positive(shape[-1] if each else 1) * (1 if divide else 20)
    y, _ = torch_npu.npu_rms_norm_quant_v2(
        draw.strided(x), gamma.npu(), scale.npu(), beta=beta.npu(), epsilon=EPSILON, div_mode=divide
    )
    exact = rms_norm(x, gamma, beta)[0]
    yield y, Rounded(exact / scale.double() if divide else exact * scale.double())


@case(*FLOATS, target=("qint8", "quint8", "qint32"), each=(False, True))
def quantise_by_division(draw: Draw, target: str, each: bool) -> Pairs:
    shape = [draw.between(1, 4), draw.between(2, 9), draw.between(2, 20)]
    axis = draw.below(3)
    x = draw.normal(*shape) * 3
    kind = torch.bfloat16 if draw.dtype == torch.bfloat16 else torch.float32
    scale = draw.positive(shape[axis] if each else 1, dtype=kind) / 8
    zero = draw.integers(0, 20, scale.shape[0], dtype=torch.int32)
    if kind == torch.bfloat16:
        zero = zero.to(kind)
    y = torch_npu.npu_quantize(draw.strided(x), scale.npu(), zero.npu(), getattr(torch, target), axis)
    along = [-1 if d == axis and each else 1 for d in range(3)]
    exact = x.double() / scale.double().view(along) + zero.double().view(along)
    low, high = {"qint8": (-128, 127), "quint8": (0, 255), "qint32": (-(2**31), 2**31 - 1)}[target]
    yield y.cpu().to(torch.int32 if target == "qint32" else y.dtype), Rounded(exact, low, min(high, 1000))


@case(*FLOATS, axis=(-1, -2), shifted=(False, True))
def quantise_by_multiplication(draw: Draw, axis: int, shifted: bool) -> Pairs:
    shape = [draw.between(1, 4), draw.between(2, 9), draw.between(2, 20)]
    x, scale = draw.normal(*shape), draw.positive(shape[axis]) * 20
    offset = draw.normal(shape[axis]) if shifted else None
    y = torch_npu.npu_quantize(draw.strided(x), scale.npu(), optional(offset), torch.qint8, axis, False)
    along = [1, -1, 1] if axis == -2 else [1, 1, -1]
    exact = x.double() * scale.double().view(along)
    yield y, Rounded(exact if offset is None else exact + offset.double().view(along))


def unpacked(packed: Tensor) -> Tensor:
    """Unpack int4 values, eight per int32, the first in the lowest bits."""
    nibbles = (packed.cpu().unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15
    return torch.where(nibbles > 7, nibbles - 16, nibbles).flatten(-2)


@case(*HALVES)
def quantise_to_int4(draw: Draw) -> Pairs:
    x, scale = draw.normal(3, 8 * draw.between(1, 5)), draw.positive(1) * 3
    y = torch_npu.npu_quantize(draw.strided(x), scale.npu(), None, torch.quint4x2, -1, False)
    yield unpacked(y), Rounded(x.double() * scale.double(), -8, 7)
    y, found = torch_npu.npu_dynamic_quant(draw.strided(x), dst_type=torch.quint4x2)
    yield from dynamically_quantized(x.double(), unpacked(y), found, 7)


@case(*HALVES, smooth=(None, "one", "groups"), symmetric=(True, False))
def dynamic_quant(draw: Draw, smooth: str | None, symmetric: bool) -> Pairs:
    shape = [draw.between(1, 4), draw.between(2, 9), draw.between(2, 20)]
    x, count = draw.normal(*shape), shape[0] * shape[1]
    factors, ends, exact = None, None, x.double()
    if smooth == "one":
        factors = draw.positive(shape[2])
        exact = exact * factors.double()
    elif smooth == "groups":
        factors, ends = draw.positive(2, shape[2]), torch.tensor([draw.below(count + 1), count], dtype=torch.int32)
        by_row = factors.double().repeat_interleave(torch.tensor([ends[0], count - ends[0]]), 0)
        exact = exact * by_row.view(x.shape)
    operation = torch_npu.npu_dynamic_quant if symmetric else torch_npu.npu_dynamic_quant_asymmetric
    results = operation(draw.strided(x), smooth_scales=optional(factors), group_index=optional(ends))
    if symmetric:
        yield from dynamically_quantized(exact, *results)
        return
    y, scale, offset = results
    scales = (exact.amax(-1) - exact.amin(-1)) / 255
    yield scale, Near(scales)
    yield offset, Near(127 - exact.amax(-1) / scales)
    yield y, Rounded((exact - exact.amax(-1, keepdim=True)) / scales.unsqueeze(-1) + 127)


@case(*FLOATS, mode=("half", "interleave"), dims=(3, 4))
def rotary(draw: Draw, mode: str, dims: int) -> Pairs:
    shape = [draw.between(1, 5) for _ in range(dims - 1)] + [2 * draw.between(1, 40)]
    like = [size if draw.below(2) else 1 for size in shape[:-1]] + shape[-1:]
    x, cos, sin = draw.normal(*shape), draw.normal(*like), draw.normal(*like)
    y = torch_npu.npu_rotary_mul(draw.strided(x), draw.strided(cos), draw.strided(sin), mode)
    yield y, Near(rope(x, cos, sin, mode == "interleave"), 3)


@case(*FLOATS, layout=("BSND", "TND"), dim=(64, 128))
def rotary_in_place(draw: Draw, layout: str, dim: int) -> Pairs:
    leading = [draw.between(1, 4) for _ in range(2 if layout == "BSND" else 1)]
    query, key = draw.normal(*leading, draw.between(1, 6), dim), draw.normal(*leading, draw.between(1, 3), dim)
    cos, sin = draw.normal(*leading, 1, dim), draw.normal(*leading, 1, dim)
    on_npu = query.npu(), key.npu()
    results = torch_npu.npu_apply_rotary_pos_emb(*on_npu, cos.npu(), sin.npu(), layout, "half")
    for given, result, x in zip(on_npu, results, (query, key), strict=True):
        yield result, Near(rope(x, cos, sin), 3)
        yield given, Same(result.cpu())


@case(*HALVES)
def interleave_rope(draw: Draw) -> Pairs:
    shape = [draw.between(1, 4) for _ in range(3)]
    x = draw.normal(*shape, 64)
    like = [shape[0], 1, draw.choice([1, shape[2]]), 64]
    cos, sin = draw.normal(*like), draw.normal(*like)
    y = torch_npu.npu_interleave_rope(x.npu(), cos.npu(), sin.npu())
    yield y, Near(rope(x.unflatten(-1, (32, 2)).transpose(-1, -2).flatten(-2), cos, sin), 3)


@case(*FLOATS, sections=(0, 3, 4), cache_mode=("default", "interleave"), mode=("half", "interleave"))
def mrope(draw: Draw, sections: int, cache_mode: str, mode: str) -> Pairs:
    tokens = draw.between(1, 6)
    if sections == 4:
        cache_mode = "default"
    known = {0: [[0, 0, 0]], 3: [[16, 24, 24], [24, 20, 20], [8, 12, 12], [11, 11, 10]], 4: [[16, 16, 16, 16]]}
    section = draw.choice(known[sections])
    rotary_dim = 2 * sum(section) or draw.choice([32, 64])
    head = draw.choice([64, 128]) if rotary_dim <= 64 else 128
    query, key = draw.normal(tokens, head * draw.between(1, 4)), draw.normal(tokens, head)
    cache = draw.normal(50, rotary_dim)
    positions = draw.integers(0, 49, *([sections, tokens] if sections else [tokens]), dtype=torch.int64)
    results = torch_npu.npu_mrope(
        positions.npu(),
        query.npu(),
        key.npu(),
        cache.npu(),
        head,
        mrope_section=section,
        rotary_mode=mode,
        cache_mode=cache_mode,
    )
    cos, sin = cache.double()[positions].chunk(2, -1)
    if sections and cache_mode == "default":
        cos, sin = (torch.cat([part[i] for i, part in enumerate(each.split(section, -1))], -1) for each in (cos, sin))
    elif sections:
        mixed = []
        for each in (cos, sin):
            one = each[0].clone()
            for i in (1, 2):
                one[..., i : section[i] * 3 : 3] = each[i][..., i : section[i] * 3 : 3]
            mixed.append(one)
        cos, sin = mixed
    widen: Callable[[Tensor], Tensor] = (
        (lambda each: torch.cat([each, each], -1)) if mode == "half" else (lambda each: each.repeat_interleave(2, -1))
    )
    for x, y in zip((query, key), results, strict=True):
        heads = x.double().unflatten(1, (-1, head))
        part = rope(heads[..., :rotary_dim], widen(cos)[:, None], widen(sin)[:, None], mode == "interleave")
        yield y, Near(torch.cat([part, heads[..., rotary_dim:]], -1).flatten(1), 3)


def swiglu_of(x: Tensor, dim: int = -1, left: bool = True) -> Tensor:
    gate, linear = x.double().chunk(2, dim) if left else reversed(x.double().chunk(2, dim))
    return torch.nn.functional.silu(gate) * linear


@case(*FLOATS, dim=(0, 1, -1))
def swiglu(draw: Draw, dim: int) -> Pairs:
    x = draw.normal(*(2 * draw.between(1, 6) for _ in range(3)))
    yield torch_npu.npu_swiglu(draw.strided(x), dim), Near(swiglu_of(x, dim))


@case(*FLOATS, dynamic=(True, False), left=(True, False), groups=(None, "ends", "counts"))
def swiglu_quant(draw: Draw, dynamic: bool, left: bool, groups: str | None) -> Pairs:
    tokens, half = draw.between(2, 9), draw.between(4, 20)
    x, count = draw.normal(tokens, 2 * half), 1 if groups is None else 2
    smooth, offsets = draw.positive(count, half, dtype=torch.float32), draw.normal(count, half, dtype=torch.float32)
    split = draw.below(tokens + 1)
    index = torch.tensor([split, tokens] if groups == "ends" else [split, tokens - split], dtype=torch.int32)
    y, scale = torch_npu.npu_swiglu_quant(
        draw.strided(x),
        smooth_scales=smooth.npu(),
        offsets=None if dynamic else offsets.npu(),
        group_index=None if groups is None else index.npu(),
        activate_left=left,
        quant_mode=int(dynamic),
        group_list_type=int(groups == "counts"),
    )
    repeats = torch.tensor([tokens] if groups is None else [split, tokens - split])
    values = swiglu_of(x, left=left) * smooth.double().repeat_interleave(repeats, 0)
    if dynamic:  # the scale factor
        yield scale, Near(127 / values.abs().amax(-1))
        yield y, Rounded(values * (127 / values.abs().amax(-1, keepdim=True)))
    else:
        yield y, Rounded(values + offsets.double().repeat_interleave(repeats, 0))


@case(torch.int32, *HALVES, mode=(0, 1, 2), dynamic=(True, False), grouped=(False, True), left=(True, False))
def dequant_swiglu_quant(draw: Draw, mode: int, dynamic: bool, grouped: bool, left: bool) -> Pairs:
    tokens, half, integers = draw.between(2, 9), 64, draw.dtype == torch.int32
    x = draw.integers(-200, 200, tokens, 2 * half, dtype=torch.int32) if integers else draw.normal(tokens, 2 * half)
    groups, split = 1 + grouped, draw.below(tokens + 1)
    counts = torch.tensor([split, tokens - split] if grouped else [tokens])
    weight_scale = draw.positive(groups, 2 * half, dtype=torch.float32) / 50 if integers else None
    activation_scale = draw.positive(tokens, 1, dtype=torch.float32) if integers else None
    quant_scale = draw.positive(groups, half, dtype=torch.float32)
    offset = None if dynamic or grouped else draw.integers(-9, 9, groups, half, dtype=torch.int32).float()
    y, scale = torch_npu.npu_dequant_swiglu_quant(
        x.npu(),
        weight_scale=optional(weight_scale),
        activation_scale=optional(activation_scale),
        quant_scale=quant_scale.npu(),
        quant_offset=optional(offset),
        group_index=counts.npu() if grouped else None,
        activate_left=left,
        quant_mode=int(dynamic),
        swiglu_mode=mode,
        clamp_limit=2.0,
        glu_alpha=1.5,
        glu_bias=0.5,
    )
    values = x.double()
    if weight_scale is not None and activation_scale is not None:
        values = values * weight_scale.double().repeat_interleave(counts, 0) * activation_scale.double()
    if mode == 0:
        values = swiglu_of(values, left=left)
    else:
        gate, linear = values.chunk(2, -1) if left else reversed(values.chunk(2, -1))
        if mode == 1:
            gate, linear = values[:, ::2], values[:, 1::2]
        gate, linear = gate.clamp(max=2), linear.clamp(-2, 2)
        values = gate * torch.sigmoid(1.5 * gate) * (linear + 0.5)
    by_row = quant_scale.double().repeat_interleave(counts, 0)
    if dynamic:
        yield from dynamically_quantized(values * by_row, y, scale)
    else:
        yield y, Rounded(values / by_row + (0 if offset is None else offset.double()))


@case(*FLOATS, approximate=(0, 1), left=(True, False))
def geglu(draw: Draw, approximate: int, left: bool) -> Pairs:
    x, dim = draw.normal(*(2 * draw.between(1, 6) for _ in range(3))), draw.choice([0, 1, 2, -1])
    y, gelu = torch_npu.npu_geglu(draw.strided(x), dim, approximate, left)
    gate, linear = x.double().chunk(2, dim) if left else reversed(x.double().chunk(2, dim))
    activated = torch.nn.functional.gelu(gate, approximate="tanh" if approximate else "none")
    yield y, Near(activated * linear)
    yield gelu, Near(activated)


@case(*FLOATS, limits=("p", "k", "pk"))
def top_k_top_p(draw: Draw, limits: str) -> Pairs:
    batch, words = draw.between(1, 5), draw.between(5, 60)
    logits = torch.stack([draw.permutation(words) for _ in range(batch)]).to(draw.dtype) / 8
    p, k = (
        (torch.rand(batch, generator=draw.generator) * 0.9 + 0.05).to(draw.dtype),
        draw.integers(1, words, batch, dtype=torch.int32),
    )
    result = torch_npu.npu_top_k_top_p(
        logits.npu(), p.npu() if "p" in limits else None, k.npu() if "k" in limits else None
    )
    expected = logits.double().clone()
    for row, row_p, row_k in zip(expected, p.double(), k.tolist(), strict=True):
        if "k" in limits:
            row[row < row.sort(descending=True).values[row_k - 1]] = -torch.inf
        if "p" in limits:
            order = row.argsort()
            dropped = row[order].softmax(0).cumsum(0) <= 1 - row_p
            dropped[-1] = False
            row[order[dropped]] = -torch.inf
    yield result, Same(expected.to(draw.dtype))


@thorough(EXHAUSTIVE, r"seed[1-9]")
@thorough(DTYPE, r"-bfloat16-")
@pytest.mark.parametrize(("run", "arguments", "dtype", "seed"), list(parameters(__name__)))
def test_operation(run: Callable[..., Pairs], arguments: dict[str, Any], dtype: torch.dtype, seed: int) -> None:
    check(run, arguments, dtype, seed)
