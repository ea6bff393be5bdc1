"""Triton's projections with weights of 4 and 8 bits against the references. Run by test_triton_kernels.py, in a process
of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hal.backends.cuda.triton import KERNELS
from helpers.thorough import DRAW
from helpers.triton_checking import DEVICE, DTYPES, LOW_BITS, check
from torch import Tensor

from hal import ops
from hal.errors import OperationError
from hal.ops import Draw, Sample
from hal.ops.float8 import float8_values
from hal.ops.int4_projection import int8_rows, row_sums
from hal.ops.weight_only import quantized_groups

further = pytest.mark.thorough(DRAW)
agree = partial(check, sides=("after",))
"""In one run, between fences at the tensors' ends."""


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def moved(values: Any) -> list[Any]:
    return [value.to(DEVICE) if isinstance(value, Tensor) else value for value in values]


@pytest.mark.parametrize("name", sorted(LOW_BITS))
def test_some_declared_samples(name: str) -> None:
    for place, sample in enumerate(ops.operation(name).samples(Draw(torch.bfloat16, seed=1))):
        if place % 4 == 1:
            agree(name, torch.bfloat16, sample)
    assert place > 4


@further
@pytest.mark.parametrize("name", sorted(LOW_BITS))
def test_declared_samples(name: str, dtype: torch.dtype) -> None:
    cases = 0
    for sample in ops.operation(name).samples(Draw(dtype, seed=0)):
        check(name, dtype, sample)
        cases += 1
    assert cases > 4


def weight_only(draw: Draw, rows: int, width: int, out: int, bits: int, group: int, zero: bool) -> Sample:
    weight, scale, zeros = quantized_groups(draw, bits, out, width, group_size=group)
    x = draw.normal(rows, width + 5)[:, 2:-3]
    return x, weight, scale, zeros if zero else None, draw.normal(out) if zero else None, group


@pytest.mark.parametrize(
    ("rows", "width", "out", "bits", "group", "zero"),
    [(1, 264, 40, 4, 32, True), (17, 200, 70, 8, 64, False), (70, 72, 24, 4, 72, True), (3, 96, 8, 8, 48, True)],
)
def test_shapes_that_end_within_tiles(rows: int, width: int, out: int, bits: int, group: int, zero: bool) -> None:
    """Of each size of tiles; groups whose size is no power of two are torch's."""
    dtype = DTYPES[rows % 3]
    agree("weight_only_linear", dtype, weight_only(Draw(dtype, seed=rows), rows, width, out, bits, group, zero))


@further
@pytest.mark.parametrize("group", [16, 32, 64, 128, 256, 1024])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 16, 30, 64, 130])
def test_groups_of_any_size(rows: int, bits: int, group: int, dtype: torch.dtype) -> None:
    draw = Draw(dtype, seed=rows)
    for width in (128, 320):
        agree("weight_only_linear", dtype, weight_only(draw, rows, width, 33, bits, group, width == 320))


@pytest.mark.parametrize("bits", [4, 8])
def test_every_number_is_read(bits: int) -> None:
    """At every place of a word, in float32, exactly."""
    most, width = 1 << bits - 1, 256
    numbers = torch.arange(-most, most).repeat(width // (2 * most)).to(torch.int32)
    weight = ops.weight_only.pack_int4(numbers[None]) if bits == 4 else numbers[None].to(torch.int8)
    x, scale = torch.eye(width), torch.full((1, 1), 0.5)
    found = KERNELS["weight_only_linear"](*moved((x, weight, scale, None, None, width)))
    assert torch.equal(found.cpu()[:, 0], numbers * 0.5)


def test_every_float8_is_read() -> None:
    bits = torch.arange(256, dtype=torch.uint8)[None]
    bits[(bits & 127) == 127] = 0  # NaN, tested below
    found = KERNELS["fp8_linear"](*moved((torch.eye(256), bits, torch.full((1, 1), 0.5), None, 1, 256)))
    assert torch.equal(found.cpu()[:, 0], float8_values(bits)[0] * 0.5)


@further
@pytest.mark.parametrize("rows", [1, 16, 30, 64, 130])
def test_int8_rows_with_int4_groups(rows: int, dtype: torch.dtype) -> None:
    draw = Draw(dtype, seed=rows)
    for width, group in ((128, 32), (320, 64), (72, 72), (96, 48)):
        weight, scale, _ = quantized_groups(draw, 4, 33, width, group_size=group)
        x, x_scale = int8_rows(draw, rows, width)
        sums = row_sums(weight, scale, group)
        agree("quant_linear_int4", dtype, (x, x_scale, weight, scale, sums, None, group, dtype))


@pytest.mark.parametrize("rows", [2, 70])
def test_sums_beyond_float16_are_scaled(rows: int) -> None:
    x, width = torch.full((rows, 2048), 127, dtype=torch.int8), 2048
    weight, scale = torch.full((3, width // 8), 0x77777777, dtype=torch.int32), torch.full((3, width // 64), 0.5)
    given = x, torch.full((rows,), 1e-3), weight, scale, row_sums(weight, scale, 64), None, 64, torch.float16
    found = KERNELS["quant_linear_int4"](*moved(given)).cpu()
    assert torch.equal(found, torch.full((rows, 3), 127 * 7 * 0.5 * 2048 * 1e-3, dtype=torch.float16))


def test_what_is_not_finite_stays_in_its_row() -> None:
    draw = Draw(torch.bfloat16, seed=8)
    sample = moved(weight_only(draw, 20, 64, 24, 4, 32, False))
    sample[0][4] = float("nan")
    found = KERNELS["weight_only_linear"](*sample)
    assert found[4].isnan().all()
    assert found[[row for row in range(20) if row != 4]].isfinite().all()
    weight = torch.zeros(3, 64, dtype=torch.uint8)
    weight[1, 7] = 0x7F
    found = KERNELS["fp8_linear"](*moved((torch.ones(2, 64), weight, torch.ones(1, 1), None, 3, 64)))
    assert found[:, 1].isnan().all()
    assert (found[:, [0, 2]] == 0).all()


def test_what_does_not_fit_is_refused() -> None:
    x, weight, scale, zero, bias, group = weight_only(Draw(seed=0), 3, 64, 8, 8, 32, True)
    bits = torch.zeros(8, 64, dtype=torch.uint8)
    words, by_token = torch.zeros(8, 8, dtype=torch.int32), torch.ones(3)
    for name, sample in (
        ("weight_only_linear", (x[:, :60], weight, scale, zero, bias, group)),
        ("weight_only_linear", (x, weight, scale[:, :1], zero, bias, group)),
        ("weight_only_linear", (x, weight, scale, zero[:4], bias, group)),
        ("weight_only_linear", (x, weight, scale, zero, bias[:4], group)),
        ("weight_only_linear", (x, weight, scale, zero, bias, 16)),
        ("weight_only_linear", (x, weight.short(), scale, zero, bias, group)),
        ("linear_int8", (x, weight, scale, None)),
        ("linear_int8", (x[:, :60], weight, scale[:, 0], None)),
        ("fp8_linear", (x, bits, scale, None, 4, 16)),
        ("fp8_linear", (x, bits.char(), torch.ones(2, 4), None, 4, 16)),
        ("fp8_linear", (x, bits, torch.ones(2, 4).half(), None, 4, 16)),
        ("fp8_linear", (x, bits, torch.ones(2, 4), bias[:4], 4, 16)),
        ("quant_linear_int4", (x.char(), by_token[:2], words, scale, bias, None, group, x.dtype)),
        ("quant_linear_int4", (x, by_token, words, scale, bias, None, group, x.dtype)),
        ("quant_linear_int4", (x.char(), by_token, words, scale[:, :1], bias, None, group, x.dtype)),
    ):
        with pytest.raises(OperationError, match=f"{name} was given"):
            KERNELS[name](*moved(sample))
