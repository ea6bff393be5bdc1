"""Triton's projections with weights of 4 and 8 bits against the references. Run by test_triton_kernels.py, in a process
of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hal.backends.triton import KERNELS
from helpers.triton_checking import DTYPES, check, further, moved

from hal import ops
from hal.errors import OperationError
from hal.ops import Draw, Sample
from hal.ops.form_samples import drawn_input, drawn_weight
from hal.ops.forms import Form

LINEAR: Any = KERNELS["linear"]
agree = partial(check, "linear", sides=("after",))
"""In one run, between fences at the tensors' ends."""
INT4 = Form("int4", columns=32)


def drawn(form: Form, rows: int, width: int, out: int, dtype: torch.dtype, *, biased: bool = False) -> Sample:
    """Return arguments whose rows are of a wider tensor."""
    draw = Draw(dtype, seed=rows)
    weight, scale, zero = drawn_weight(draw, form, out, width)
    x, x_scale = drawn_input(draw, form, rows, width + 5)
    return x[:, 2:-3], weight, draw.normal(out) if biased else None, scale, zero, x_scale, dtype, form


@pytest.mark.parametrize("dtype", [torch.bfloat16, *(pytest.param(each, marks=further) for each in DTYPES[::2])])
def test_declared_samples(dtype: torch.dtype) -> None:
    """Every other sample: bfloat16 has those that the other dtypes leave out."""
    samples = [each for each in ops.operation("linear").samples(Draw(dtype, seed=0)) if LINEAR.taking(each[-1])]
    for sample in samples[DTYPES.index(dtype) % 2 :: 2]:
        agree(dtype, sample)
    assert len({sample[-1] for sample in samples[DTYPES.index(dtype) % 2 :: 2]}) > 12


@pytest.mark.parametrize(
    ("form", "rows", "width", "out"),
    [
        (Form("int4", columns=32, zero_points=True), 1, 264, 40),
        (Form("int4", columns=256, zero_points=True), 4, 264, 40),
        (Form("int4", columns=256, zero_points=True), 5, 264, 40),
        (Form("int8", columns=64), 17, 200, 70),
        (Form("int4", columns=72, zero_points=True), 70, 72, 24),
        (Form("int8", columns=48, zero_points=True), 3, 96, 8),
        (Form("int4", columns=48, inputs="int8"), 4, 96, 8),
        (Form("int4", columns=32, inputs="static_int8"), 5, 72, 24),
        (Form("float8", rows=0, columns=64), 70, 224, 24),
        (Form("float4", columns=32, scales="e8m0"), 17, 200, 70),
        (Form("float4", columns=32, scales="e8m0"), 70, 36, 24),
        (Form("float8", columns=32, scales="e8m0"), 3, 72, 24),
        (Form("float4", columns=16, scales="e4m3"), 3, 64, 24),
    ],
    ids=str,
)
def test_shapes_that_end_within_tiles(form: Form, rows: int, width: int, out: int) -> None:
    """Of each size of tiles; weights that the kernels do not read, such as groups of 48, are torch's.

    Many rows are torch's, too, and of columns that do not come in 32s, oneDNN multiplies with AMX what is between rows
    as well (uxlfoundation/oneDNN#5717): here NaN.
    """
    dtype = DTYPES[rows % 3]
    agree(dtype, drawn(form, rows, width, out, dtype, biased=form.zero_points))


@further
@pytest.mark.parametrize("group", [16, 32, 64, 128, 256, 1024])
@pytest.mark.parametrize("numbers", ["int4", "int8", "float8"])
@pytest.mark.parametrize("rows", [1, 16, 30, 64, 130])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_of_any_size(dtype: torch.dtype, rows: int, numbers: str, group: int) -> None:
    for width in (128, 320):
        zero = width == 320 and numbers != "float8"
        agree(dtype, drawn(Form(numbers, columns=group, zero_points=zero), rows, width, 33, dtype))
        if numbers == "int4":
            agree(dtype, drawn(Form(numbers, columns=group, inputs="int8"), rows, width, 33, dtype))


@pytest.mark.parametrize("numbers", ["int8", "int4", "float8", "float4"])
def test_every_number_is_read(numbers: str) -> None:
    """At every place of a word, in float32, exactly, from packed weights and from those that a launch widens."""
    form = Form(numbers, scales="e8m0" if numbers == "float4" else "float")
    every = torch.arange(256, dtype=torch.uint8)
    if numbers == "float8":
        every[(every & 127) == 127] = 0  # NaN, tested below
    weight = torch.stack([every.roll(place) for place in range(4)]).view(form.kind.dtype)
    scale = torch.full((4, 1), 126, dtype=torch.uint8) if numbers == "float4" else torch.full((4, 1), 0.5)
    eye, rest = torch.eye(form.width(weight)), (None, scale, None, None, None, form)
    for each in (eye, eye[:64], eye[-64:]):
        found = LINEAR(*moved((each, weight, *rest))).cpu()
        assert torch.equal(found, each @ form.kind.values(weight).t() * 0.5)


@pytest.mark.parametrize("rows", [2, 70])
def test_sums_beyond_float16_are_scaled(rows: int) -> None:
    x, width = torch.full((rows, 2048), 127, dtype=torch.int8), 2048
    weight, scale = torch.full((3, width // 8), 0x77777777, dtype=torch.int32), torch.full((3, width // 64), 0.5)
    form = Form("int4", columns=64, inputs="int8")
    given = x, weight, None, scale, None, torch.full((rows,), 1e-3), torch.float16, form
    found = LINEAR(*moved(given)).cpu()
    assert torch.equal(found, torch.full((rows, 3), 127 * 7 * 0.5 * 2048 * 1e-3, dtype=torch.float16))


def test_what_is_not_finite_stays_in_its_row() -> None:
    sample = moved(drawn(INT4, 20, 64, 24, torch.bfloat16))
    sample[0][4] = float("nan")
    found = LINEAR(*sample)
    assert found[4].isnan().all()
    assert found[[row for row in range(20) if row != 4]].isfinite().all()
    weight = torch.zeros(3, 64, dtype=torch.uint8)
    weight[1, 7] = 0x7F
    form = Form("float8", rows=0)
    found = LINEAR(*moved((torch.ones(2, 64), weight, None, torch.ones(1, 1), None, None, None, form)))
    assert found[:, 1].isnan().all()
    assert (found[:, [0, 2]] == 0).all()


def test_what_does_not_fit_is_refused() -> None:
    draw = Draw(seed=0)
    weight, scale, zero = drawn_weight(draw, Form("int8", columns=32, zero_points=True), 8, 64)
    x, bias, by_token = draw.normal(3, 64), draw.normal(8), torch.ones(3)
    bits, words, wide = weight.view(torch.uint8), torch.zeros(8, 8, dtype=torch.int32), torch.ones(2, 4)
    given = {"x": x, "weight": weight, "bias": bias, "scale": scale, "zero": zero, "x_scale": None, "dtype": None}
    blocks = {**given, "weight": bits, "scale": wide, "zero": None}
    rounded = {**given, "x": x.char(), "weight": words, "zero": None, "x_scale": by_token, "dtype": x.dtype}
    groups, of_blocks = Form("int8", columns=32, zero_points=True), Form("float8", rows=4, columns=16)
    dynamic = Form("int4", columns=32, inputs="int8")
    for form, arguments, wrong in (
        (groups, given, {"x": x[:, :60]}),
        (groups, given, {"scale": scale[:, :1]}),
        (groups, given, {"zero": zero[:4]}),
        (groups, given, {"bias": bias[:4]}),
        (groups, given, {"weight": weight.short()}),
        (groups, given, {"x_scale": by_token}),
        (Form("int8", columns=16), given, {}),
        (Form("int8"), given, {"zero": None}),
        (of_blocks, blocks, {"weight": bits.char()}),
        (of_blocks, blocks, {"scale": wide.char()}),
        (of_blocks, blocks, {"bias": bias[:4]}),
        (dynamic, rounded, {"x_scale": by_token[:2]}),
        (dynamic, rounded, {"x_scale": None}),
        (dynamic, rounded, {"x": x}),
        (dynamic, rounded, {"scale": scale[:, :1]}),
        (dynamic, rounded, {"dtype": None}),
    ):
        with pytest.raises(OperationError, match=r"linear of .* was given"):
            LINEAR(*moved({**arguments, **wrong}.values()), form)
