"""Tests for forms of weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch

import hal
from hal import ops
from hal.errors import OperationError
from hal.ops import Draw
from hal.ops.form_samples import drawn_input, drawn_weight
from hal.ops.forms import FLOAT, Form, dequantize, with_second
from hal.ops.kernels.partial_kernel import FormKernels, plain
from hal.ops.kernels.prepared_arguments import check_kernel


@pytest.mark.parametrize("inputs", ["int8", "static_int8"])
@pytest.mark.parametrize("form", [Form("int8", zero_points=True), Form("int8", scales="e8m0")], ids=str)
def test_zero_points_and_scales_count_whatever_the_inputs_are(form: Form, inputs: str) -> None:
    draw, form = Draw(seed=0), attrs.evolve(form, inputs=inputs)
    weight, scale, zero = drawn_weight(draw, form, 24, 64)
    x, x_scale = drawn_input(draw, form, 3, 64)
    found = ops.operation("linear").reference(x, weight, None, scale, zero, x_scale, torch.float32, form)
    wanted = x.double() @ dequantize(form, weight, scale, zero).double().t()
    wanted = wanted if x_scale is None else wanted * x_scale[:, None]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("form", [Form("int8", zero_points=True), Form("int4"), Form("float8", rows=16)], ids=str)
@pytest.mark.parametrize("name", ["linear", "grouped_linear"])
def test_a_bias_of_int32_is_in_units_of_its_rows_scale(name: str, form: Form, cpu: hal.Backend) -> None:
    draw, form, operation = Draw(seed=0), attrs.evolve(form, inputs="static_int8"), ops.operation(name)
    experts = (1,) if name == "grouped_linear" else ()
    weight, scale, zero = drawn_weight(draw, form, *experts, 24, 64)
    (x, _), bias = drawn_input(draw, form, 3, 64), draw.integers(-(2**14), 2**14, *experts, 24, dtype=torch.int32)
    rows = scale.repeat_interleave(form.rows, -2)[..., :24, 0]
    wanted = (x.double() @ dequantize(form, weight, scale, zero).double().mT + (bias * rows).double()).view(3, 24)
    given = x, weight, *([torch.tensor([3])] if experts else []), bias, scale, zero, None, torch.float32, form
    for run in (operation.reference, cpu.kernels[name]):
        torch.testing.assert_close(run(*given).double(), wanted, rtol=1e-4, atol=1e-3)


def test_a_bias_of_int32_is_refused_if_rows_have_several_scales() -> None:
    draw, form = Draw(seed=0), Form("int8", columns=32, inputs="static_int8")
    weight, scale, zero = drawn_weight(draw, form, 24, 64)
    bias = torch.ones(24, dtype=torch.int32)
    given = torch.ones(3, 64, dtype=torch.int8), weight, bias, scale, zero, None, torch.float32, form
    with pytest.raises(OperationError, match=r"in groups of 32, and static int8 inputs have 2 scales"):
        ops.operation("linear").reference(*given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_bias_of_float32_beside_others(dtype: torch.dtype, cpu: hal.Backend) -> None:
    draw = Draw(dtype, seed=0)
    x, weight, bias = draw.normal(3, 64), draw.normal(96, 64, scale=0.125), draw.normal(96).float()
    given = x, weight, bias, None, None, None, None, FLOAT
    wanted = (x.double() @ weight.double().t() + bias).to(dtype)
    for run in (ops.operation("linear").reference, cpu.kernels["linear"]):
        torch.testing.assert_close(run(*given), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"scales": "e4m4"}, "scales 'e4m4'"),
        ({"inputs": "int4"}, "inputs 'int4'"),
        ({"columns": -32}, "1 x -32"),
        ({"rows": -1}, "-1 x 0"),
        ({"second": True}, "second scales, scales 'float'"),
        ({"second": True, "scales": "e4m3", "zero_points": True}, "zero_points True"),
    ],
    ids=str,
)
def test_a_form_that_no_product_knows_is_refused(given: Mapping[str, Any], problem: str) -> None:
    with pytest.raises(OperationError, match=problem):
        Form("int8", **given)


def test_second_scales_multiply_those_of_a_row(cpu: hal.Backend) -> None:
    draw, form = Draw(seed=0), Form("float4", columns=16, scales="e4m3", second=True)
    weight, scale, _ = drawn_weight(draw, form, 24, 64)
    first, second = scale[:, :4].contiguous(), torch.rand(24) + 0.5
    exact = dequantize(attrs.evolve(form, second=False), weight, first) * second.unsqueeze(-1)
    torch.testing.assert_close(dequantize(form, weight, with_second(first, second)), exact)
    assert form.nbytes(24, 64, torch.bfloat16) == weight.nbytes + scale.nbytes


def test_inputs_in_float8() -> None:
    x = torch.cat([torch.zeros(1, 64), torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * 3])
    numbers, scale = ops.operation("float8_quantize").reference(x)
    wanted = (x[1:] / (x[1:].abs().amax(-1, keepdim=True) / 448)).to(torch.float8_e4m3fn).float()
    assert torch.equal(numbers[1:], wanted)
    assert torch.equal(scale, x.abs().amax(-1) / 448)
    assert not numbers[0].any()


def test_kernels_of_forms_are_a_kernel() -> None:
    def doubled(x: torch.Tensor, weight: torch.Tensor, *others: object) -> torch.Tensor:
        return 2 * x @ weight.t()

    kernels = FormKernels("linear", [(plain, doubled)])
    check_kernel("acme", ops.operation("linear"), kernels)
    draw, form = Draw(seed=0), Form("int8")
    x, rest = draw.normal(3, 64), (None, None, None, None)
    weight = draw.normal(8, 64)
    assert torch.equal(kernels(x, weight, *rest, None, FLOAT), doubled(x, weight))
    numbers, scale, _ = drawn_weight(draw, form, 8, 64)
    given = x, numbers, None, scale, None, None, None, form
    assert torch.equal(kernels(*given), ops.operation("linear").reference(*given))
