"""Sample weights in every form, for the declarations of the operations that take them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hal.ops.declaration.constraints import Draw
from hal.ops.forms import Form, float8_bits, float8_values, with_second

INT8 = Form("int8")
INT8_DYNAMIC = Form("int8", inputs="int8")
INT8_STATIC = Form("int8", inputs="static_int8")
FORMS = (
    INT8,
    INT8_DYNAMIC,
    INT8_STATIC,
    Form("int8", columns=32),
    Form("int8", columns=128, zero_points=True),
    Form("int8", zero_points=True),
    Form("int8", zero_points=True, inputs="static_int8"),
    Form("int4"),
    Form("int4", columns=32, zero_points=True),
    Form("int4", columns=64),
    Form("int4", columns=128),
    Form("int4", inputs="int8"),
    Form("int4", columns=32, inputs="int8"),
    Form("int4", columns=256, inputs="int8"),
    Form("float8", rows=128, columns=128),
    Form("float8", rows=64, columns=64),
    Form("float8"),
    Form("float8", rows=0),
    Form("float8", inputs="float8"),
    Form("float8", rows=128, columns=128, inputs="float8"),
    Form("float4", columns=32, scales="e8m0"),
    Form("float4", columns=16, scales="e4m3", second=True),
)
"""Forms whose scales cover a row, a group, a block and all, with every kind of numbers and of inputs."""
SHAPES = ((64, 96), (256, 80), (96, 40), (192, 48))
"""in_features and out_features. The last group of a row, and block of rows, may be smaller."""
MORE_SHAPES = {"int8": ((24, 40), (2080, 48)), "float4": ((32, 33),)}
"""Further ones by the kind of numbers: no multiple of a vector register, and long exact sums."""


def shapes(form: Form) -> tuple[tuple[int, int], ...]:
    """Return in_features and out_features of the samples of a form."""
    return (*SHAPES, *MORE_SHAPES.get(form.numbers, ()))


def drawn_weight(draw: Draw, form: Form, *shape: int, place: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the numbers of a weight ``[..., out_features, in_features]``, its scales and zero points.

    Args:
        draw: the source of values.
        form: the form.
        shape: that of the weight.
        place: the number of the sample, which decides dtypes.
    """
    *leading, out, width = shape
    kind, blocks = form.kind, form.blocks(out, width)
    if form.numbers == "float8":
        numbers = kind.pack(draw.integers(-300, 300, *shape).float().cpu()).to(draw.device)
        most = 300.0
    elif form.numbers == "float4":
        numbers, most = draw.integers(0, 256, *leading, out, width // 2, dtype=torch.uint8), 6.0
    else:
        least = kind.least or 0
        numbers = kind.pack(draw.integers(least + form.exact, -least, *shape, dtype=torch.int8))
        most = float(-least)
    if form.scales != "float":
        least, most = (120, 124) if form.scales == "e8m0" else (40, 72)  # of e4m3, from 0.25 to 4
        bits = draw.integers(least, most, *leading, *blocks, dtype=torch.uint8)
        if form.second:
            bits = with_second(bits, draw.integers(50, 200, *leading, blocks[0]).float() * (1e-3 * width**-0.5))
        return numbers, bits, None
    scale = draw.integers(50, 200, *leading, *blocks).float() * (1e-2 / most * width**-0.5)
    if form.inputs == "static_int8":
        scale *= 1e-2  # It includes the input's scale.
    if form.columns and form.inputs == "float" and form.rows == 1:
        scale = scale.to((torch.float32, torch.bfloat16, torch.float16)[place % 3])
    if not form.zero_points:
        return numbers, scale, None
    zero = draw.integers(-int(most), int(most), *leading, *blocks, dtype=torch.int8)
    return numbers, scale, zero.float() + 0.25 if place % 2 else zero


def drawn_input(draw: Draw, form: Form, rows: int, width: int) -> tuple[Tensor, Tensor | None]:
    """Return ``[rows, width]`` as the form takes it, and the scale of each row, or None."""
    if form.inputs == "float":
        return draw.normal(rows, width), None
    if form.inputs == "float8":
        numbers = float8_values(float8_bits(draw.normal(rows, width).float().cpu() * 100))
        return numbers.to(draw.device, draw.dtype), draw.integers(50, 200, rows).float() * 1e-4
    x = draw.integers(-127, 128, rows, width, dtype=torch.int8)
    if form.inputs != "int8":
        return x, None
    return x, draw.integers(50, 200, rows).float() * 1e-4


def drawn_bias(draw: Draw, form: Form, *shape: int, place: int = 0) -> Tensor | None:
    """Return a bias in a dtype that the form takes, or None for some samples."""
    if not place % 2:
        return None
    if form.inputs == "static_int8" and not form.columns:
        return draw.integers(-(2**14), 2**14, *shape, dtype=torch.int32)
    bias = draw.normal(*shape)
    return bias.float() if place % 4 == 1 else bias


def samples_of_forms() -> Iterator[tuple[Form, int, int, int]]:
    """Yield each form with the number of its sample, in_features and out_features."""
    for form in FORMS:
        for place, (width, out) in enumerate(shapes(form)):
            yield form, place, width, out


def result_dtype(draw: Draw, x: Tensor) -> Any:
    """Return the dtype that a call states: of an int8 input, that of the draw."""
    return None if x.is_floating_point() else draw.dtype
