"""Tests for weights in each form on the NPU: launches, eager and in graphs, and the weights prepared at load."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import emulated_cann
import pytest
import torch
import torch_npu
from hal.backends.npu.kernels import quantized
from helpers.kernel_checks import on_cpu
from helpers.thorough import DTYPE, thorough
from torch import Tensor

import hal
from hal import ops
from hal.nn import WeightUse
from hal.ops import Draw, Sample
from hal.ops.form_samples import INT8, INT8_DYNAMIC, INT8_STATIC, drawn_bias, drawn_input, drawn_weight
from hal.ops.forms import Form
from hal.ops.tolerance import assert_agree
from hal.testing.compared_call import prepare_weights
from hal.vendor import AddedKernel

pytestmark = pytest.mark.usefixtures("one_thread")
Opened = Callable[..., hal.Backend]
DTYPES = (torch.float16, torch.bfloat16)
FRACTAL_NZ = 29
EXPERTS, OUT, WIDTH = 4, 96, 512
FLOAT8, FLOAT4 = Form("float8", rows=128, columns=128), Form("float4", columns=32, scales="e8m0")

WEIGHT_QUANT, QUANT, GROUPED = "WeightQuantBatchMatmulV2", "QuantMatmulV5", "GroupedMatmulV5"
LAUNCHES: dict[tuple[str, Form], str | int] = {
    ("linear", INT8): WEIGHT_QUANT,
    ("linear", Form("int8", zero_points=True)): WEIGHT_QUANT,
    ("linear", Form("int8", columns=64, zero_points=True)): WEIGHT_QUANT,
    ("linear", Form("int4")): WEIGHT_QUANT,
    ("linear", Form("int4", columns=64)): WEIGHT_QUANT,
    ("linear", Form("int4", columns=256, zero_points=True)): WEIGHT_QUANT,
    ("linear", INT8_STATIC): QUANT,
    ("linear", INT8_DYNAMIC): QUANT,
    ("linear", Form("int4", inputs="int8")): QUANT,
    ("linear", Form("int4", columns=256, inputs="int8")): QUANT,
    ("linear", Form("int4", columns=128, inputs="int8")): 12,
    ("linear", Form("int8", columns=16)): 4,
    ("linear", FLOAT8): 6,
    ("linear", FLOAT4): 4,
    ("grouped_linear", INT8): GROUPED,
    ("grouped_linear", Form("int8", columns=WIDTH, zero_points=True)): GROUPED,
    ("grouped_linear", Form("int4", columns=64)): GROUPED,
    ("grouped_linear", Form("int4", zero_points=True)): GROUPED,
    ("grouped_linear", INT8_STATIC): GROUPED,
    ("grouped_linear", INT8_DYNAMIC): GROUPED,
    ("grouped_linear", Form("int4", inputs="int8")): GROUPED,
    ("grouped_linear", Form("int4", columns=256, inputs="int8")): GROUPED,
    ("grouped_linear", Form("int4", columns=128, inputs="int8")): 12,
    ("grouped_linear", Form("int8", columns=64)): 4,
    ("grouped_linear", FLOAT8): 6,
    ("grouped_linear", FLOAT4): 4,
    ("embedding", Form("int8", columns=16)): 5,
    ("embedding", Form("int4", columns=64, zero_points=True)): 12,
    ("embedding", FLOAT8): 7,
    ("embedding", FLOAT4): 5,
}
"""The only kernel, or the number of launches, of a call with prepared weights."""


def each_dtype() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("dtype", DTYPES, ids=str)


def arguments(draw: Draw, name: str, form: Form, tokens: int, *, width: int = WIDTH, out: int = OUT) -> Sample:
    """Return the arguments of an operation, with a bias if it costs no launch."""
    experts = (EXPERTS,) if name == "grouped_linear" else ()
    weight, scale, zero = drawn_weight(draw, form, *experts, out, width)
    if name == "embedding":
        return draw.integers(0, out, tokens), weight, scale, zero, draw.dtype, form
    x, x_scale = drawn_input(draw, form, tokens, width)
    free = form.inputs != "int8" or (form.exact and not experts)
    bias = drawn_bias(draw, form, *experts, out, place=1) if free else None
    counts = [draw.tensor([tokens - tokens // 2, 0, tokens // 2, 0], torch.int64)] if experts else []
    return x, weight, *counts, bias, scale, zero, x_scale, None if form.inputs == "float" else draw.dtype, form


def counted(run: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    torch.npu.synchronize()
    with emulated_cann.trace() as trace:
        found = run()
        torch.npu.synchronize()
    assert not trace.ran("copy")
    return found, trace.counts()


@thorough(DTYPE, r"\[torch\.bfloat16")
@pytest.mark.parametrize(("name", "form"), LAUNCHES, ids=str)
@pytest.mark.parametrize("nz", [False, True], ids=["nd", "nz"])
@each_dtype()
def test_launches(npu: Opened, dtype: torch.dtype, nz: bool, name: str, form: Form) -> None:
    """Eagerly, and in a graph that is captured once and replayed with new inputs."""
    backend, operation, expected = npu(options={"nz_weights": nz}), ops.operation(name), LAUNCHES[name, form]
    if nz and form.exact:
        expected = {QUANT: "QuantMatmulWeightNz", GROUPED: "GroupedMatmulWeightNz"}[expected]

    def check(found: Tensor, launches: dict[str, int], given: Sample) -> None:
        if isinstance(expected, int):
            assert sum(launches.values()) == expected
        else:
            assert launches == {expected: 1}
        assert_agree(operation, dtype, found, operation.reference(*on_cpu(given)), str(form))

    for tokens in (1, 17):
        given = arguments(Draw(dtype, "npu", tokens), name, form, tokens)
        prepared = prepare_weights(backend, operation, given, dtype)
        check(*counted(lambda run=prepared: operation.function(*run)), given)
    graph = backend.graph()
    found = graph.capture(lambda: operation.function(*prepared))
    fresh = arguments(Draw(dtype, "npu", 3), name, form, 17)
    for each, held, new in zip(operation.signature.parameters, given, fresh, strict=True):
        if each in ("x", "token_ids", "x_scale") and new is not None:
            held.copy_(new)  # which is prepared's, too
    check(found, counted(graph.replay)[1], given)


@pytest.mark.parametrize("form", [INT8, Form("int8", columns=16), Form("int4", columns=64), FLOAT8, FLOAT4], ids=str)
def test_a_lookup_widens_its_rows_only(npu: Opened, form: Form) -> None:
    backend, operation, dtype = npu(), ops.operation("embedding"), torch.bfloat16
    given = prepare_weights(backend, operation, arguments(Draw(dtype, "npu"), "embedding", form, 3), dtype)
    graph = backend.graph()
    graph.capture(lambda: operation.function(*given))
    with emulated_cann.trace() as trace:
        graph.replay()
    written = [math.prod(to.shape) for each in trace.ran() for to in each.operands if to.access != "read"]
    assert max(written) == 3 * WIDTH, written


@each_dtype()
@pytest.mark.parametrize("form", [Form("int4", columns=64, zero_points=True), Form("int8", zero_points=True)], ids=str)
@pytest.mark.parametrize("name", ["linear", "grouped_linear", "embedding"])
def test_zero_points_in_16_bits(npu: Opened, name: str, form: Form, dtype: torch.dtype) -> None:
    backend, operation = npu(), ops.operation(name)
    place = list(operation.signature.parameters).index("weight_zero_point")
    given = list(arguments(Draw(dtype, "npu"), name, form, 5))
    given[place] = given[place].to(dtype)
    found = operation.function(*prepare_weights(backend, operation, given, dtype))
    assert_agree(operation, dtype, found, operation.reference(*on_cpu(given)), str(form))


@each_dtype()
def test_sums_that_float32_does_not_hold(npu: Opened, dtype: torch.dtype) -> None:
    """A sum beyond 2 ** 24 differs by 1 in the result if the bias cancels the rest."""
    backend, width = npu(), 2048
    x = torch.full((1, width), 127, dtype=torch.int8, device="npu")
    weight = torch.full((2, width), 127, dtype=torch.int8, device="npu")
    weight[1, 0] = 126
    x[0, 0] = 1
    bias = torch.full((2,), -127 * 127 * (width - 1), dtype=torch.int32, device="npu")
    given = x, weight, bias, torch.ones(2, 1, device="npu"), None, None, dtype, INT8_STATIC
    prepared = prepare_weights(backend, ops.operation("linear"), given, dtype)
    assert backend.ops.linear(*prepared).tolist() == [[127, 126]]


@pytest.mark.parametrize(("name", "form"), [each for each in LAUNCHES if each[0] != "embedding"], ids=str)
def test_replaced_weights_are_those_of_a_fresh_load(npu: Opened, name: str, form: Form) -> None:
    """In the memory of the former ones, with scales, zero points and what is derived from them."""
    dtype, operation = torch.float16, ops.operation(name)
    backend, use = npu(options={"nz_weights": True}), WeightUse(name, dtype, form)
    given, other = (arguments(Draw(dtype, "npu", seed), name, form, 5) for seed in (1, 2))
    prepared = dict(zip(operation.signature.parameters, prepare_weights(backend, operation, given, dtype), strict=True))
    new = dict(zip(operation.signature.parameters, other, strict=True))
    held = {each: prepared[each] for each in operation.weights if prepared[each] is not None}
    backend.replace_weights(held, {each: new[each] for each in operation.weights if new[each] is not None}, use)
    found = operation.function(*{**new, **held}.values())
    assert torch.equal(found.cpu(), operation.function(*prepare_weights(backend, operation, other, dtype)).cpu())


class TestPrepared:
    @pytest.mark.parametrize("seed", range(3), ids="seed={}".format)
    def test_scales_for_float16_are_rounded_to_nearest(self, npu: Opened, seed: int) -> None:
        npu()
        scale = Draw(torch.float32, "npu", seed).normal(1000).abs() * 1e-4
        packed = quantized.packed(quantized.rounded(scale)).cpu()
        assert packed.dtype == torch.int64
        assert (packed >> 32 == 1 << 14).all()
        held = packed.to(torch.int32).view(torch.float32)
        assert (held.view(torch.int32) & 0x1FFF == 0).all()
        off = ((held - scale.cpu()) / scale.cpu()).abs().max()
        assert 2**-12 < off <= 2**-11, "half a step of ten bits, where truncation would give a whole step"

    @pytest.mark.parametrize("form", [INT8_STATIC, INT8_DYNAMIC], ids=str)
    def test_what_the_kernel_takes_stays(self, npu: Opened, form: Form) -> None:
        weights = {"weight": torch.ones(96, 64, dtype=torch.int8), "weight_scale": torch.rand(96, 1)}
        weights = {name: each.to("npu") for name, each in weights.items()}
        found = npu().prepare_weights(weights, WeightUse("linear", torch.bfloat16, form))
        assert all(found[name] is weights[name] for name in weights)

    def test_weights_of_a_kernel_that_a_package_adds_stay(self, npu: Opened) -> None:
        backend, form = npu(), Form("int4", columns=256, zero_points=True)
        added = AddedKernel("npu", "linear", form.__eq__, print).before(backend.kernels["linear"])
        backend.kernels = {**backend.kernels, "linear": added}
        weights = dict.fromkeys(("weight", "weight_scale", "weight_zero_point"), torch.ones(8, 1, device="npu"))
        assert backend.prepare_weights(weights, WeightUse("linear", torch.float16, form)) is weights

    def test_a_scale_as_it_is_costs_a_launch(self, npu: Opened) -> None:
        backend, dtype = npu(), torch.float16
        given = arguments(Draw(dtype, "npu"), "linear", INT8_STATIC, 3)
        _, launches = counted(lambda: backend.ops.linear(*given))
        assert launches == {"TransQuantParamV3": 1, "QuantMatmulV5": 1}

    @pytest.mark.parametrize("name", ["linear", "grouped_linear"])
    def test_weights_in_fractal_nz(self, npu: Opened, name: str) -> None:
        """CANN does not support dimensions of 1 in this format."""
        backend = npu(options={"nz_weights": True})
        for out, width in ((96, 64), (1, 64), (96, 1), (40, 24)):
            given = arguments(Draw(torch.float16, "npu"), name, INT8_DYNAMIC, 3, width=width, out=out)
            prepared = prepare_weights(backend, ops.operation(name), given, torch.float16)
            assert prepared[1].shape == given[1].shape
            assert (torch_npu.get_npu_format(prepared[1]) == FRACTAL_NZ) == (min(out, width) > 1)
            assert torch_npu.get_npu_format(given[1]) != FRACTAL_NZ
        x, thin = torch.ones(2, 64, dtype=torch.int8, device="npu"), torch.ones(64, 1, dtype=torch.int8, device="npu")
        with pytest.raises(RuntimeError, match="FRACTAL_NZ must have no dimension of size 1"):
            torch_npu.npu_quant_matmul(
                x, torch_npu.npu_format_cast(thin, FRACTAL_NZ), torch.ones(1, device="npu"), output_dtype=torch.bfloat16
            )
