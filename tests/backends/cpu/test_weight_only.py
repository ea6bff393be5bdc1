"""Tests for the CPU's products of few rows with weights of 8 and 4 bits."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_int64

import pytest
import torch
from hal.backends.cpu import low_bits
from hal.backends.cpu.native import build
from hal.backends.cpu.native.processor import processor_flags
from hal.backends.cpu.native.weight_only_kernels import MOST_WITHOUT_16_BITS, WeightOnlyKernels
from helpers.thorough import EXHAUSTIVE, MODE, thorough
from torch import Tensor

import hal
from hal.errors import OperationError
from hal.ops import Draw
from hal.ops.form_samples import drawn_input, drawn_weight
from hal.ops.forms import Form, dequantize, with_second

SIZES = (
    (96, 64, 32),
    (64, 256, 128),
    (48, 192, 192),
    (40, 96, 64),
    (1000, 576, 32),
    (50, 1024, 1024),
    (33, 320, 160),
    (24, 336, 16),
    (24, 608, 32),
    (20, 40, 5),
)
FLOAT4 = Form("float4", columns=32, scales="e8m0")
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)
ROWS = (1, 2, 3, 4, 7, 8, 12, 13, 16, 17, 64, 130)
INTEGERS = 64 if "avx512_vnni" in processor_flags() else 16
"""Rows of x up to which x is rounded to integers."""


@pytest.fixture(scope="module")
def kernels() -> WeightOnlyKernels:
    return WeightOnlyKernels(build.load())


@pytest.fixture(scope="module")
def tiles(emulated_tiles: ctypes.CDLL) -> WeightOnlyKernels:
    return WeightOnlyKernels(emulated_tiles)


def weights(bits: int, out: int, width: int) -> Tensor:
    if bits == 8:
        return torch.randint(-128, 128, (out, width)).to(torch.int8)
    return torch.randint(-(1 << 31), 1 << 31, (out, width // 8)).to(torch.int32)


def multiplied(
    kernels: WeightOnlyKernels,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    group: int,
    *,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    form = of_weight(weight, group)
    return kernels.linear(x, weight, bias, scale, zero, None, None, form, out=out)


def of_weight(weight: Tensor, group: int) -> Form:
    return Form("int8" if weight.dtype is torch.int8 else "int4", columns=group, zero_points=True)


def check(kernels: WeightOnlyKernels, dtype: torch.dtype, bits: int, *, as_integers: int) -> None:
    """Compare with products of dequantized weights in float64; each size has every other number of rows.

    Of up to ``as_integers`` rows, the error is that of one rounding of the result. Of more, and for groups of unusual
    sizes, weights may be rounded to x's dtype, too.
    """
    torch.manual_seed(0)
    eps = torch.finfo(dtype).eps
    for place, (out, width, group) in enumerate(SIZES):
        weight, groups = weights(bits, out, width), -(-width // group)
        scale = (torch.rand(out, groups) + 0.5).to((torch.float32, torch.bfloat16, torch.float16)[place % 3])
        zeros = torch.randint(-8, 8, (out, groups))
        for number, rows in list(enumerate(ROWS))[place % 2 :: 2]:
            zero = (None, zeros.to(torch.int8), zeros.float() + 0.25)[(place + number) % 3]
            bias = (None, torch.randn(out).to(dtype), torch.randn(out))[number % 3]
            x = torch.randn(rows, 2 * width + 1).to(dtype)[:, :width]
            x = x if number % 2 else x.contiguous()
            found = multiplied(kernels, x, weight, scale, group, zero=zero, bias=bias)
            wide = dequantize(of_weight(weight, group), weight, scale, zero).double()
            expected = x.double() @ wide.t() + (0 if bias is None else bias.double())
            sizes = x.double().abs() @ wide.abs().t()
            exact = rows <= as_integers and group not in (5, 160) and (group != 16 or bits == 8)
            slack = eps * expected.abs() + (2e-4 if exact else max(eps, 2e-4)) * sizes
            assert found.dtype is dtype
            assert ((found.double() - expected).abs() <= slack).all(), f"{out} x {width} by {group}, {rows} rows"


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_any_size_group_and_zero_point(dtype: torch.dtype, bits: int, kernels: WeightOnlyKernels) -> None:
    check(kernels, dtype, bits, as_integers=INTEGERS)


@pytest.mark.parametrize("bits", [8, 4])
@thorough(MODE)
def test_tiles(bits: int, tiles: WeightOnlyKernels) -> None:
    """They take from 8 rows on."""
    check(tiles, torch.bfloat16, bits, as_integers=INTEGERS)
    check_experts(tiles, torch.float16)


@thorough(EXHAUSTIVE, r"\[(avx512|sse4)\]")
@thorough(MODE)
@pytest.mark.parametrize("highest", ["sse4", "avx2", "avx512"])
def test_lower_instruction_sets(highest: str) -> None:
    lower = WeightOnlyKernels(build.load(highest))  # type: ignore[arg-type]
    for bits in (8, 4):
        check(lower, torch.bfloat16, bits, as_integers=16)
    check_experts(lower, torch.bfloat16)
    rows_are_independent(lower)


def rows_are_independent(kernels: WeightOnlyKernels) -> None:
    """A row is the same alone and among others that are multiplied as integers, to the last bit."""
    torch.manual_seed(0)
    in_columns = kernels.function("integer_rows", c_int64)() > 16  # another kernel, of more than two rows
    many, x, out, width = (1, 2) if in_columns else (1, 2, 3, 4, 5, 16), torch.randn(16, 512).half(), 128, 512
    for bits, group in ((4, 32), (4, 128), (8, 32), (8, 128)):
        weight, scale = weights(bits, out, width), torch.rand(out, width // group) + 0.5
        zero = torch.randint(-8, 8, scale.shape).to(torch.int8)
        bias = -multiplied(kernels, x[:1], weight, scale, group, zero=zero)[0].float()  # which leaves the last bits
        alone, *others = (multiplied(kernels, x[:n], weight, scale, group, zero=zero, bias=bias)[0] for n in many)
        assert all(torch.equal(each, alone) for each in others), f"{bits} bits in groups of {group}"


def test_a_row_does_not_depend_on_the_others(kernels: WeightOnlyKernels) -> None:
    rows_are_independent(kernels)


@pytest.mark.parametrize("rows", [2, 20])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(
    broken: float, rows: int, kernels: WeightOnlyKernels, tiles: WeightOnlyKernels
) -> None:
    torch.manual_seed(0)
    x, weight, scale = torch.randn(rows, 256).bfloat16(), weights(4, 64, 256), torch.ones(64, 2)
    x[1, 200] = broken
    for each in (kernels, tiles):
        found = multiplied(each, x, weight, scale, 128)
        assert found[0].isfinite().all()
        assert not found[1].isfinite().any()


@pytest.mark.parametrize("rows", [1, 20])
def test_a_large_element_changes_its_block(rows: int, kernels: WeightOnlyKernels, tiles: WeightOnlyKernels) -> None:
    """Each block of 128 elements has a scale."""
    torch.manual_seed(0)
    weight, scale = weights(8, 64, 1024), torch.ones(64, 1)
    weight[:, :128] = 0
    for each in (kernels, tiles):
        x = torch.randn(rows, 1024).bfloat16()
        expected = multiplied(each, x, weight, scale, 1024)
        x[-1, 0] = 1e4
        assert torch.equal(multiplied(each, x, weight, scale, 1024), expected)


def test_others_use_torch(kernels: WeightOnlyKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows, and none. C++ widens the weight of many."""
    weight, scale = weights(8, 40, 64), torch.rand(40, 2)
    monkeypatch.delattr(low_bits, "dequantize")
    for x in (torch.randn(MOST_WITHOUT_16_BITS + 1, 64), torch.randn(0, 64)):
        expected = x @ dequantize(of_weight(weight, 32), weight, scale).t()
        for out in (None, torch.empty(x.shape[0], 40)):
            torch.testing.assert_close(multiplied(kernels, x, weight, scale, 32, out=out), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_lookups_round_once(dtype: torch.dtype, kernels: WeightOnlyKernels) -> None:
    torch.manual_seed(0)
    for place, (vocabulary, width, group) in enumerate(SIZES):
        for bits in (8, 4):
            weight, groups = weights(bits, vocabulary, width), -(-width // group)
            scale = (torch.rand(vocabulary, groups) + 0.5).to((torch.float32, torch.bfloat16, torch.float16)[place % 3])
            zeros = torch.randint(-8, 8, (vocabulary, groups))
            zero = (None, zeros.to(torch.int8), zeros.float() + 0.25)[(place + bits) % 3]
            ids = torch.randint(0, vocabulary, (place * 30,), dtype=(torch.int64, torch.int32)[place % 2])
            form = of_weight(weight, group)
            found = kernels.embedding(ids, weight, scale, zero, dtype, form)
            assert torch.equal(found, dequantize(form, weight, scale, zero).to(dtype)[ids.long()])


@pytest.mark.parametrize("token", [-1, 40])
def test_tokens_outside_the_table_are_refused(token: int, kernels: WeightOnlyKernels) -> None:
    ids, weight, scale = torch.tensor([3, token]), weights(8, 40, 64), torch.rand(40, 2)
    with pytest.raises(OperationError, match=f"outside the table of 40 rows: {min(3, token)} to {max(3, token)}"):
        kernels.embedding(ids, weight, scale, None, torch.float32, Form("int8", columns=32))
    with pytest.raises(OperationError, match="embedding was given"):
        kernels.embedding(ids[:1], weight, scale, None, torch.float32, Form("int8", columns=16))


def check_experts(kernels: WeightOnlyKernels, dtype: torch.dtype) -> None:
    """Each expert gives what its own product gives, also one with more rows than a call of the kernel takes."""
    counts = torch.tensor([3, 0, 70, 1])
    for form in (Form("int8", columns=32, zero_points=True), Form("int4", columns=32, zero_points=True), FLOAT4):
        draw = Draw(dtype, seed=1)
        x, bias = draw.normal(75, 96), draw.normal(4, 40).float()
        x[74] = float("nan")  # beyond the counts
        weight, scale, zero = drawn_weight(draw, form, 4, 40, 96)
        wide = dequantize(form, weight, scale, zero)
        found = kernels.grouped_linear(x, weight, counts, bias, scale, zero, None, None, form)
        for expert, part in enumerate(x[:74].split(counts.tolist())):
            expected = part.double() @ wide[expert].double().t() + bias[expert].double()
            sizes = part.double().abs() @ wide[expert].double().abs().t() + 1
            difference = found[:74].split(counts.tolist())[expert].double() - expected
            assert (difference.abs() <= max(torch.finfo(dtype).eps, 2e-4) * sizes).all(), (form, expert)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_experts(dtype: torch.dtype, kernels: WeightOnlyKernels) -> None:
    check_experts(kernels, dtype)


@thorough(MODE, "tiles")
@pytest.mark.parametrize("name", ["kernels", "tiles"])
def test_every_number_of_float4_and_every_exponent(name: str, request: pytest.FixtureRequest) -> None:
    """Of one row and of many, with and without products of integers; powers of two are exact."""
    kernels: WeightOnlyKernels = request.getfixturevalue(name)
    weight = torch.arange(256, dtype=torch.uint8).view(1, 256)
    numbers = torch.tensor(E2M1)[torch.stack((weight & 15, weight >> 4), -1).flatten().long()]
    for rows, exponent in ((2, 127), (33, 127), (33, 120), (2, 130)):
        scale = torch.full((1, 16), exponent, dtype=torch.uint8)
        for dtype in (torch.bfloat16, torch.float32):
            for chosen in torch.eye(512, dtype=dtype).split(rows)[:: 1 if rows > 2 else 16]:
                found = kernels.linear(chosen, weight, None, scale, None, None, None, FLOAT4)
                assert torch.allclose(
                    found.float()[:, 0], chosen.float() @ numbers * 2.0 ** (exponent - 127), rtol=1e-4
                )
    exponents = torch.arange(1, 254, dtype=torch.uint8).view(-1, 1)
    ones = torch.full((253, 16), 0x22, dtype=torch.uint8)
    x = torch.zeros(1, 32)
    x[0, 5] = 1
    found = kernels.linear(x, ones, None, exponents, None, None, None, FLOAT4)
    assert torch.equal(found[0].double(), 2.0 ** (exponents.double().flatten() - 127))


def test_every_float8_as_a_scale_beside_a_second_one(kernels: WeightOnlyKernels) -> None:
    form, bits = Form("float4", columns=16, scales="e4m3", second=True), torch.arange(256, dtype=torch.uint8)
    ones, second = torch.full((256, 8), 0x22, dtype=torch.uint8), torch.linspace(0.01, 10, 256)
    scale = with_second(bits.unsqueeze(-1), second)
    wanted = bits.view(torch.float8_e4m3fn).float() * second
    for dtype in (torch.float32, torch.bfloat16):
        found = kernels.embedding(torch.arange(256), ones, scale, None, dtype, form)
        assert torch.equal(found[:, 5].nan_to_num(999), wanted.to(dtype).nan_to_num(999))
    x = torch.zeros(40, 16)
    x[:, 5] = 1
    for rows in (1, 40):
        found = kernels.linear(x[:rows], ones, None, scale, None, None, None, form)
        assert torch.equal(found[0].nan_to_num(999), wanted.nan_to_num(999))


def test_counts_beyond_the_rows_are_refused(kernels: WeightOnlyKernels) -> None:
    weight, scale, _ = drawn_weight(Draw(seed=1), FLOAT4, 2, 8, 32)
    for counts in ([2, 2], [-1, 1]):
        with pytest.raises(OperationError, match="grouped_linear: the experts have"):
            kernels.grouped_linear(
                torch.ones(3, 32), weight, torch.tensor(counts), None, scale, None, None, None, FLOAT4
            )


@pytest.mark.parametrize("native", [True, False], ids=["C++", "torch"])
@pytest.mark.parametrize(
    "form",
    [
        Form("int8", zero_points=True, inputs="int8"),
        Form("int8", rows=2, columns=32),
        Form("int4", columns=32, zero_points=True, inputs="static_int8"),
        Form("float8", rows=0, inputs="int8"),
        Form("float4", columns=16, scales="e4m3"),
        Form("float8", columns=64, scales="e4m3", inputs="float8", second=True),
        Form("int4", columns=32, zero_points=True, inputs="float8"),
        Form("int8", inputs="float8"),
    ],
    ids=str,
)
def test_forms_that_no_sample_has(form: Form, native: bool) -> None:
    kernels, draw = hal.open({"backend": "cpu", "options": {"native": native}}).kernels, Draw(torch.float32)
    weight, scale, zero = drawn_weight(draw, form, 2, 40, 64)
    (x, x_scale), bias, ids = drawn_input(draw, form, 9, 64), draw.normal(2, 40), torch.tensor([39, 0, 2])
    given = bias, scale, zero, x_scale, torch.float32, form
    wide = dequantize(form, weight, scale, zero)
    expected = x.float() @ wide.transpose(1, 2) * (1 if x_scale is None else x_scale.unsqueeze(-1)) + bias.unsqueeze(1)
    own = [each if each is None else each[0] for each in (weight, bias, scale, zero)]
    for found, right in (
        (kernels["linear"](x, *own, x_scale, torch.float32, form), expected[0]),
        (
            kernels["grouped_linear"](x, weight, torch.tensor([4, 5]), *given),
            torch.cat((expected[0, :4], expected[1, 4:])),
        ),
        (kernels["embedding"](ids, own[0], *own[2:], torch.float32, form), wide[0, ids]),
    ):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("form", "rows", "width", "out"),
    [
        (Form("int8"), 3, 64, 40),
        (Form("int8"), low_bits.PACKED_ROWS + 1, 64, 40),
        (Form("float8", rows=128, columns=128), 3, 4096, 300),
        (Form("int8", rows=3, zero_points=True), 3, 4096, 300),
    ],
    ids=str,
)
def test_torch_multiplies_any_number_of_rows(form: Form, rows: int, width: int, out: int) -> None:
    """Few rows by an int8 weight, and weights that are widened in several parts."""
    kernels, draw = hal.open({"backend": "cpu", "options": {"native": False}}).kernels, Draw(torch.bfloat16)
    weight, scale, zero = drawn_weight(draw, form, out, width)
    x, bias = draw.normal(rows, width), draw.normal(out)
    found = kernels["linear"](x, weight, bias, scale, zero, None, None, form)
    expected = x.double() @ dequantize(form, weight, scale, zero).double().t() + bias
    assert (found - expected).norm() < 1e-2 * expected.norm()
