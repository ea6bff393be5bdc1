"""Tests that the kernels which the CPU's backend describes are those that multiply, at each number of rows."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hal.backends.cpu import packing
from hal.backends.cpu.description import of_rows
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hal
from hal import ops
from hal.nn import WeightUse
from hal.ops.form_samples import drawn_input, drawn_weight
from hal.ops.forms import FLOAT, Form
from hal.ops.kernels.partial_kernel import AddedKernel

WIDTH, OUT = 256, 160
GROUPS, SMALL_GROUPS = Form("int4", columns=128, zero_points=True), Form("int4", columns=8)
NVFP4 = Form("float4", columns=16, scales="e4m3", second=True)
FORMS = FLOAT, Form("int8"), GROUPS, SMALL_GROUPS, Form("float4", columns=32, scales="e8m0"), NVFP4
INT8_INPUTS = Form("int8", inputs="int8"), Form("int4", inputs="int8"), Form("float8", rows=128, columns=128)
BY_ROWS = re.compile(r"(C\+\+|oneDNN|torch) \((.*?)\)(?: up to (\d+) rows?)?(?:, then |, |$)")


class Products(TorchDispatchMode):
    """Notes the name of the last product of torch's, and the dtype of its operands."""

    found = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in ("mm", "addmm", "linear", "_int_mm", "_weight_int8pack_mm", "_linear_pointwise"):
            operand = str(args[1].dtype).removeprefix("torch.")
            self.found = "oneDNN (packed" if name == "_linear_pointwise" else f"torch ({operand}"
        return func(*args, **(kwargs or {}))


def prepared(backend: hal.Backend, dtype: torch.dtype, form: Form) -> tuple[list[Tensor | None], str]:
    """Return the weight, its scales and zero points as the backend takes them, and the description."""
    draw, use = ops.Draw(dtype), WeightUse("linear", dtype, form)
    numbers = (draw.normal(OUT, WIDTH), None, None) if form == FLOAT else drawn_weight(draw, form, OUT, WIDTH)
    given = dict(zip(("weight", "weight_scale", "weight_zero_point"), numbers, strict=True))
    held = backend.prepare_weights({name: each for name, each in given.items() if each is not None}, use)
    return [held.get(name) for name in given], backend.describe_kernel(held["weight"], use)


@pytest.mark.parametrize("form", [*FORMS, *INT8_INPUTS], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"native": False}, {"native": False, "pack_weights": False}], ids=str)
def test_what_is_described_multiplies(
    options: dict[str, Any], dtype: torch.dtype, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MIN_BYTES", 1)
    monkeypatch.setattr(packing, "_measured", {})
    monkeypatch.setattr(packing, "measure", lambda *given: packing.Measured([2.0, 2.0, 2.0], 13, 21))
    backend = hal.open({"backend": "cpu", "options": {"native": True, **options}})
    (weight, scale, zero), text = prepared(backend, dtype, form)
    described = BY_ROWS.findall(text)
    assert described
    assert not BY_ROWS.sub("", text)
    before = 0
    for name, details, rows in described:
        most = int(rows) if rows else before + 100
        for count in (before + 1, most):
            x, x_scale = drawn_input(ops.Draw(dtype), form, count, WIDTH)
            result = None if x_scale is None and form.inputs == "float" else dtype
            with Products() as products:
                backend.ops.linear(x, weight, None, scale, zero, x_scale, result, form)
            first = details.partition(",")[0]
            assert products.found == ("" if name == "C++" else f"{name} ({first}"), f"{count} rows: {text}"
            if name == "C++" and form not in (FLOAT, *INT8_INPUTS):  # An infinity gives NaN where x is rounded.
                x[0, 0] = math.inf
                found = backend.ops.linear(x, weight, None, scale, zero, None, None, form)
                assert bool(found[0].isnan().all()) == ("as integers" in details), f"{count} rows: {text}"
        before = most
    assert not described[-1][2], text


def test_what_is_packed_and_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied table keeps both layouts."""
    monkeypatch.setattr(packing, "_measured", {})
    monkeypatch.setattr(packing, "measure", lambda *given: packing.Measured([1.5, 1.2, 0.7]))
    weight = packing.Packing().prepare(torch.zeros(512, 256), shared=True)
    assert of_rows(*packing.products(weight)) == "oneDNN (packed) up to 8 rows, then torch (float32)"


def test_a_kernel_of_a_package_is_named() -> None:
    added = AddedKernel("cpu", "linear", Form("int8").__eq__, packing.linear)
    backend, weight = hal.open("cpu"), torch.zeros(4, 4)
    before = backend.describe_kernel(weight, WeightUse("linear", torch.float32))
    backend.kernels = MappingProxyType({**backend.kernels, "linear": added.before(backend.kernels["linear"])})
    assert backend.describe_kernel(weight, WeightUse("linear", torch.float32)) == before
    found = backend.describe_kernel(weight, WeightUse("linear", torch.float32, Form("int8")))
    assert found == "hal.backends.cpu.packing.linear"
    hal.open("cpu")
