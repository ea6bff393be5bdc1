"""Tests for quantized matrix products of the emulated CANN, through the real torch_npu, against float64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import emulated_cann
import pytest
import torch
import torch_npu
from helpers.thorough import EXHAUSTIVE, thorough
from support.fused_draw import HALVES, Draw, Near, Pairs, Rounded, Same, case, check, optional, parameters
from support.grouped import in_layout, int8s, nineteen_bits, packed_int4
from torch import Tensor

pytestmark = pytest.mark.usefixtures("internal_formats")


@case(*HALVES, weight=("plain", "transposed", "nz"), bias=(None, torch.int32, torch.float32))
def by_token(draw: Draw, weight: str, bias: torch.dtype | None) -> Pairs:
    m, k, n = draw.between(1, 9), 32 * draw.between(1, 40), 32 * draw.between(1, 3)
    x1, x2 = int8s(draw, m, k), int8s(draw, k, n)
    scale, by_row = draw.positive(n, dtype=torch.float32) / 1000, draw.positive(m, dtype=torch.float32)
    added = (
        None
        if bias is None
        else (draw.normal(n, dtype=torch.float32) * (1 if bias.is_floating_point else 999)).to(bias)
    )
    y = torch_npu.npu_quant_matmul(
        x1.npu(),
        in_layout(x2, weight),
        scale.npu(),
        pertoken_scale=by_row.npu(),
        bias=optional(added),
        output_dtype=draw.dtype,
    )
    exact = x1.double() @ x2.double()
    if bias == torch.int32 and added is not None:
        exact = exact + added.double()
    exact = exact * scale.double() * by_row.double()[:, None]
    yield y, Near(exact if added is None or bias == torch.int32 else exact + added.double())


@case(torch.float16, weight=("plain", "transposed", "nz"), ready=(False, True), biased=(False, True))
def by_tensor(draw: Draw, weight: str, ready: bool, biased: bool) -> Pairs:
    m, k, n = draw.between(1, 9), 32 * draw.between(1, 4), 32 * draw.between(1, 3)
    x1, x2, scale = int8s(draw, m, k), int8s(draw, k, n), draw.positive(draw.choice([1, n]), dtype=torch.float32) / 1000
    bias = draw.integers(-999, 999, n, dtype=torch.int32) if biased else None
    given = torch_npu.npu_trans_quant_param(scale.npu()) if ready else scale.npu()
    y = torch_npu.npu_quant_matmul(
        x1.npu(), in_layout(x2, weight), given, bias=optional(bias), output_dtype=torch.float16
    )
    exact = x1.double() @ x2.double()
    yield y, Near((exact if bias is None else exact + bias.double()) * nineteen_bits(scale).double())


@case(torch.float32, shifted=(False, True))
def to_int8(draw: Draw, shifted: bool) -> Pairs:
    m, k, n = draw.between(1, 9), 32 * draw.between(1, 4), 32 * draw.between(1, 3)
    x1, x2, scale = int8s(draw, m, k), int8s(draw, k, n), draw.positive(n) / 1000
    offset = draw.integers(-20, 20, n, dtype=torch.int32).float() if shifted else None
    y = torch_npu.npu_quant_matmul(x1.npu(), x2.npu(), scale.npu(), offset=optional(offset))
    exact = (x1.double() @ x2.double()) * nineteen_bits(scale).double()
    yield y, Rounded(exact if offset is None else exact + offset.double())


@case(torch.float32, biased=(False, True))
def to_int32(draw: Draw, biased: bool) -> Pairs:
    x1, x2, scale = int8s(draw, 3, 64), int8s(draw, 64, 32), draw.positive(32)
    bias = draw.integers(-999, 999, 32, dtype=torch.int32) if biased else None
    y = torch_npu.npu_quant_matmul(x1.npu(), x2.npu(), scale.npu(), bias=optional(bias), output_dtype=torch.int32)
    exact = x1.long() @ x2.long()
    yield y, Same((exact if bias is None else exact + bias).to(torch.int32))


@case(torch.bfloat16, batches=((2,), (2, 3)))
def in_batches(draw: Draw, batches: tuple[int, ...]) -> Pairs:
    x1, x2, scale = int8s(draw, *batches, 5, 64), int8s(draw, 64, 32), draw.positive(32) / 1000
    y = torch_npu.npu_quant_matmul(x1.npu(), x2.npu(), scale.npu(), output_dtype=torch.bfloat16)
    yield y, Near((x1.double() @ x2.double()) * scale.double())


@case(*HALVES)
def of_int4(draw: Draw) -> Pairs:
    m, k, n = draw.between(1, 9), 32 * draw.between(1, 4), 32 * draw.between(1, 3)
    x1, x2 = draw.integers(-8, 7, m, k, dtype=torch.int32), draw.integers(-8, 7, k, n, dtype=torch.int32)
    scale, by_row = draw.positive(n, dtype=torch.float32) / 100, draw.positive(m, dtype=torch.float32)
    y = torch_npu.npu_quant_matmul(
        packed_int4(x1).npu(), packed_int4(x2).npu(), scale.npu(), pertoken_scale=by_row.npu(), output_dtype=draw.dtype
    )
    yield y, Near((x1.double() @ x2.double()) * scale.double() * by_row.double()[:, None])


@case(*HALVES, groups=(False, True))
def of_int4_beside_int8(draw: Draw, groups: bool) -> Pairs:
    m, k, n = draw.between(1, 9), 256 * draw.between(1, 3), 32 * draw.between(1, 3)
    x1, x2 = int8s(draw, m, k), draw.integers(-8, 7, k, n, dtype=torch.int32)
    scale = draw.positive(*([k // 256] if groups else []), n, dtype=torch.float32) / 1000
    by_row = draw.positive(m, *([1] if groups else []), dtype=torch.float32)
    packed = torch_npu.npu_trans_quant_param(scale.flatten().npu()).view(scale.shape)
    exact_scale = nineteen_bits(scale).double()
    weights = x2.double() * (exact_scale.repeat_interleave(256, 0) if groups else exact_scale)
    # CANN's documentation requires callers to prepare this; another value changes the result.
    prepared, moved = 8 * weights.sum(0), draw.normal(n, dtype=torch.float32)
    y = torch_npu.npu_quant_matmul(
        x1.npu(),
        packed_int4(x2).npu(),
        packed,
        offset=(prepared.float() + moved).npu(),
        pertoken_scale=by_row.npu(),
        output_dtype=draw.dtype,
        group_sizes=[0, 0, 256] if groups else None,
    )
    yield y, Near((x1.double() @ weights + moved) * by_row.double().view(m, 1), 3)


@case(torch.float32, shifted=(False, True), rounded=(0, 1))
def quantisation_parameters(draw: Draw, shifted: bool, rounded: int) -> Pairs:
    scale, offset = draw.positive(40), draw.normal(40) * 200 if shifted else None
    packed = torch_npu.npu_trans_quant_param(scale.npu(), optional(offset), rounded).cpu()
    bits = scale.view(torch.int32).long()
    if rounded:
        bits = bits + 0xFFF + (bits >> 13 & 1)
    expected = (bits & 0xFFFFE000) | 1 << 46
    if offset is not None:
        expected |= (offset.round().clamp(-256, 255).long() & 0x1FF) << 37
    yield packed, Same(expected)


@case(
    *HALVES, weight=("plain", "transposed"), factors=("tensor", "column", "group"), shifted=(False, True), bits=(8, 4)
)
def of_weights(draw: Draw, weight: str, factors: str, shifted: bool, bits: int) -> Pairs:
    m, k, n = draw.between(1, 5), 32 * draw.between(2, 4), 32 * draw.between(1, 3)
    largest = 2 ** (bits - 1)
    values, x = draw.integers(-largest, largest - 1, k, n, dtype=torch.int32), draw.normal(m, k)
    shape = {"tensor": (1,), "column": (n,), "group": (k // 32, n)}[factors]
    scale, offset = draw.positive(*shape) / largest, draw.integers(-4, 4, *shape, dtype=torch.int32).to(draw.dtype)
    bias = draw.normal(n, dtype=torch.float32 if draw.dtype == torch.bfloat16 else None) if shifted else None
    stored: Callable[[Tensor], Tensor] = packed_int4 if bits == 4 else lambda each: each.to(torch.int8)
    given = stored(values.t().contiguous()).npu().t() if weight == "transposed" else stored(values).npu()
    y = torch_npu.npu_weight_quant_batchmatmul(
        x.npu(),
        given,
        scale.npu(),
        antiquant_offset=offset.npu() if shifted else None,
        bias=optional(bias),
        antiquant_group_size=32 if factors == "group" else 0,
    )
    wide = (lambda each: each.double().repeat_interleave(32, 0)) if factors == "group" else (lambda each: each.double())
    exact = x.double() @ ((values.double() + (wide(offset) if shifted else 0)) * wide(scale))
    yield y, Near(exact if bias is None else exact + bias.double(), 3)


@case(*HALVES, order1=([0, 1, 2], [1, 0, 2]), split=(1, 2))
def of_transposed_batches(draw: Draw, order1: list[int], split: int) -> Pairs:
    batch, m, k, n = 2 * draw.between(1, 3), draw.between(1, 5), draw.between(1, 40), draw.between(1, 20)
    x1, x2 = draw.normal(batch, m, k), draw.normal(batch, k, n)
    y = torch_npu.npu_transpose_batchmatmul(
        x1.permute(order1).contiguous().npu(),
        x2.npu(),
        perm_x1=order1,
        perm_x2=[0, 1, 2],
        perm_y=[1, 0, 2],
        batch_split_factor=split,
    )
    exact = (x1.double() @ x2.double()).transpose(0, 1)
    yield y, Near(exact if split == 1 else exact.reshape(m, split, -1).transpose(0, 1), 3)


@thorough(EXHAUSTIVE, r"seed[1-9]")
@pytest.mark.parametrize(("run", "arguments", "dtype", "seed"), list(parameters(__name__)))
def test_product(run: Callable[..., Pairs], arguments: dict[str, Any], dtype: torch.dtype, seed: int) -> None:
    check(run, arguments, dtype, seed)


def test_the_trace_counts_floating_point_operations() -> None:
    x1, x2 = torch.ones(4, 64, dtype=torch.int8).npu(), torch.ones(64, 32, dtype=torch.int8).npu()
    with emulated_cann.trace() as trace:
        torch_npu.npu_quant_matmul(x1, x2, torch.ones(32).npu(), output_dtype=torch.bfloat16)
        torch.npu.synchronize()
    assert [each.flops for each in trace.ran() if each.name == "QuantMatmulV5"] == [2.0 * 4 * 64 * 32]
