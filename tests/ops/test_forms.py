"""Tests for forms of weights."""

from __future__ import annotations

import torch

from hal import ops
from hal.ops import Draw
from hal.ops.form_samples import drawn_input, drawn_weight
from hal.ops.forms import FLOAT, Form
from hal.ops.kernels.call_signature import check_kernel
from hal.ops.kernels.form_kernels import FormKernels, plain


def test_zero_points_are_subtracted_whatever_the_inputs_are() -> None:
    for inputs in ("int8", "static_int8"):
        draw, form = Draw(seed=0), Form("int8", zero_points=True, inputs=inputs)
        weight, scale, zero = drawn_weight(draw, form, 24, 64)
        assert zero is not None
        x, x_scale = drawn_input(draw, form, 3, 64)
        found = ops.operation("linear").reference(x, weight, None, scale, zero, x_scale, torch.float32, form)
        wanted = x.double() @ ((weight.double() - zero) * scale).t()
        wanted = wanted if x_scale is None else wanted * x_scale[:, None]
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-3)


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
