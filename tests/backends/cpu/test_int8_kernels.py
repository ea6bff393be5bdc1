"""Tests for the CPU's C++ kernels of int8 activations, against exact sums of integers, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hal.backends.cpu.kernels import int8_product_in_float32
from hal.backends.cpu.native import build
from hal.backends.cpu.native.arguments import noting
from hal.backends.cpu.native.linear_kernels import MOST_ROWS, Int8Kernels
from hal.backends.cpu.native.processor import native_flags
from helpers.thorough import MODE, thorough
from torch import Tensor

from hal import ops
from hal.errors import DriverUnavailable
from hal.ops.form_samples import INT8_DYNAMIC, INT8_STATIC

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (1, 7, 64, 65)
SIZES = ((96, 64), (50, 33), (17, 1), (1, 130), (300, 576), (16, 2050))
"""Outputs and width. The fifth weight is multiplied by all threads."""


pytestmark = pytest.mark.usefixtures("threads")


@pytest.mark.parametrize("width", [1, 1024, 2500])
def test_a_product_in_float32_is_exact(width: int) -> None:
    """Processors without products of integers compute it, so that no other test on this one may."""
    torch.manual_seed(0)
    x, weight = (torch.randint(-128, 128, (rows, width), dtype=torch.int8) for rows in (5, 7))
    x[0], weight[:2] = -128, torch.tensor([[-128], [127]])
    assert torch.equal(int8_product_in_float32(x.view(5, 1, width), weight)[:, 0], x.int() @ weight.int().t())


@pytest.fixture(params=["best", pytest.param("avx2", marks=thorough(MODE))])
def kernels(request: pytest.FixtureRequest) -> Int8Kernels:
    """Return the kernels, with instructions for integers, if the processor has them, and without."""
    highest = None if request.param == "best" else request.param
    try:
        native_flags(highest)
    except DriverUnavailable as missing:
        pytest.skip(str(missing))
    return Int8Kernels(build.load(highest))


def same(found: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    alike = found.dtype is expected.dtype and found.shape == expected.shape
    return alike and torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def in_cpp(kernels: Int8Kernels, call: Callable[[], Tensor]) -> bool:
    """Return whether a call is one of the C++ product."""
    with noting() as calls:
        call()
    return [function for function, _ in calls] == [kernels._linear]


def drawn(rows: int, out: int, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield x and a weight: random, of the largest sums, and parts of others, whose rows are not contiguous."""
    x = torch.randint(-128, 128, (rows, 2 * width + 1)).to(torch.int8)
    weight = torch.randint(-128, 128, (out, 2 * width + 1)).to(torch.int8)
    yield x[:, :width].contiguous(), weight[:, :width].contiguous()
    yield x[:, width:-1], weight[:, width:-1]
    for sign in (-128, 127):
        yield torch.full((rows, width), sign, dtype=torch.int8), torch.full((out, width), -128, dtype=torch.int8)


def sums(x: Tensor, weight: Tensor) -> Tensor:
    return x.long() @ weight.long().t()


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_sums_are_exact(rows: int, static: bool, kernels: Int8Kernels) -> None:
    torch.manual_seed(0)
    for out, width in SIZES:
        scale = torch.rand(2 * out, 1)[::2] * 1e-2  # not contiguous either
        for x, weight in drawn(rows, out, width):
            x_scale = None if static else torch.rand(rows) * 1e-1
            integers = torch.randint(-(1 << 30), 1 << 30, (out,)).to(torch.int32)
            for dtype in DTYPES:
                for bias in (None, integers) if static else (None, torch.randn(out), torch.randn(out).to(dtype)):
                    total = sums(x, weight) + integers if static and bias is not None else sums(x, weight)
                    expected = total.float() * scale.view(-1)
                    if x_scale is not None:
                        expected *= x_scale.unsqueeze(-1)
                        expected += 0 if bias is None else bias
                    given = x, weight, bias, scale, None, x_scale, dtype, INT8_STATIC if static else INT8_DYNAMIC

                    def call(given=given) -> Tensor:
                        return kernels.linear(*given)

                    assert in_cpp(kernels, call) == (rows <= MOST_ROWS)
                    assert same(call(), expected.to(dtype)), f"{out} x {width}, {dtype}"


def test_leading_dimensions_and_given_results(kernels: Int8Kernels) -> None:
    torch.manual_seed(0)
    x, weight = torch.randint(-128, 128, (2, 3, 70)).to(torch.int8), torch.randint(-128, 128, (40, 70)).to(torch.int8)
    scale, out = torch.rand(40, 1), torch.empty(2, 3, 40)
    for x_scale, form in ((torch.rand(2, 3), INT8_DYNAMIC), (None, INT8_STATIC)):
        assert kernels.linear(x, weight, None, scale, None, x_scale, torch.float32, form, out=out) is out
        expected = sums(x, weight).float() * scale.view(-1)
        assert same(out, expected if x_scale is None else expected * x_scale.unsqueeze(-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_quantized_rows(rows: int, dtype: torch.dtype, kernels: Int8Kernels) -> None:
    torch.manual_seed(0)
    for width in (1, 33, 64, 576):
        wide = torch.randn(rows, 2 * width + 1).to(dtype)
        wide[0, : 2 * width] = 0  # a row of zeros
        for x in (wide[:, :width].contiguous(), wide[:, width:-1]):
            largest = x.float().abs().amax(-1)
            expected = largest / 127
            numbers = (x.float() / torch.where(expected == 0, 1.0, expected).unsqueeze(-1)).round()
            found, scales = kernels.dynamic_quantize(x)
            assert same(scales, expected)
            assert same(found, numbers.to(torch.int8))
            for scale, offset in ((0.01, None), (0.03125, -7), (1e-6, 3)):  # the last is out of range
                numbers = (x.float() / torch.tensor(scale) + (offset or 0)).round().clamp(-128, 127)
                given = None if offset is None else torch.tensor([offset], dtype=torch.int32)
                assert same(kernels.quantize(x, torch.tensor([scale]), given), numbers.to(torch.int8))


def test_ties_round_to_even(kernels: Int8Kernels) -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, -128.5])
    assert kernels.quantize(x, torch.ones(1), None).tolist() == [0, 2, 2, 0, -2, 126, 127, -128]
    numbers, scale = kernels.dynamic_quantize(torch.tensor([[127.0, 0.5, 1.5, -2.5]]))
    assert (numbers.tolist(), scale.tolist()) == ([[127, 0, 2, -2]], [1.0])


def test_it_divides(kernels: Int8Kernels) -> None:
    """Multiplication by the reciprocal would differ, because float32 does not represent 1 / 41."""
    x, scale = torch.arange(-128, 128) * 41.0 / 2, torch.tensor([41.0])
    for quantize in (ops.operation("quantize").reference, kernels.quantize):
        found = quantize(x, scale, None)
        assert found.tolist() == [max(-128, min(127, round(each / 2))) for each in range(-128, 128)]
        assert not torch.equal(found, (x * (1 / scale)).round().clamp(-128, 127).to(torch.int8))


def test_a_repeated_scale_is_the_same(kernels: Int8Kernels) -> None:
    x, scale, offset = torch.randn(4, 32), torch.tensor([0.03]), torch.tensor([5], dtype=torch.int32)
    repeated = kernels.quantize(x, scale.expand(32).contiguous(), offset.expand(32).contiguous())
    assert torch.equal(repeated, kernels.quantize(x, scale, offset))


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite(broken: float, kernels: Int8Kernels) -> None:
    x = torch.randn(3, 70)
    x[1, 69] = broken
    numbers, scale = kernels.dynamic_quantize(x)
    assert scale.isfinite().tolist() == [True, False, True]
    expected, others = kernels.dynamic_quantize(x[::2])
    assert same(numbers[::2], expected)
    assert same(scale[::2], others)
    ones = torch.ones(4, 70, dtype=torch.int8)
    found = kernels.linear(numbers, ones, None, torch.ones(4, 1), None, scale, torch.float32, INT8_DYNAMIC)
    assert found.isfinite().all(-1).tolist() == [True, False, True]
