"""Tests for the NPU's int8 kernels: launches, eager and in graphs, and weights and scales prepared at load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hal.backends.npu import emulator
from hal.backends.npu.kernels.quantized import prepared_deq_scale
from helpers.kernel_checks import on_cpu
from helpers.thorough import DRAW, DTYPE, thorough
from torch import Tensor

import hal
from hal import ops
from hal.nn import WeightUse
from hal.ops import Draw, Sample
from hal.ops.tolerance import assert_agree

DTYPES = (torch.float16, torch.bfloat16)
FRACTAL_NZ = 29
EPS = 1e-6
TOKENS = (1, 2, 17, 257)

Opened = Callable[..., hal.Backend]


def each_dtype() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("dtype", DTYPES, ids=str)


def quantizer(draw: Draw, width: int, *, shifted: bool) -> tuple[Tensor, Tensor | None]:
    """Return a scale or offset as a model holds it: one value repeated for each element."""
    scale = float(draw.integers(20, 60, 1)[0]) / 1000
    offset = draw.integers(-20, 20, 1, dtype=torch.int32).expand(width).contiguous() if shifted else None
    return torch.full((width,), scale, device=draw.device), offset


def projection(draw: Draw, tokens: int, width: int, out: int) -> tuple[Tensor, Tensor, Tensor]:
    x = draw.integers(-128, 128, tokens, width, dtype=torch.int8)
    weight = draw.integers(-127, 128, out, width, dtype=torch.int8)
    return x, weight, draw.integers(50, 200, out).float() * 1e-6


def arguments(backend: hal.Backend, name: str, draw: Draw, tokens: int, *, shifted: bool = False) -> Sample:
    """Return the arguments with which a model of width 192 calls the operation."""
    width, out, dtype = 192, 96, draw.dtype
    hidden = draw.normal(tokens, width), draw.normal(tokens, width), draw.normal(width), EPS
    x, weight, scale = projection(draw, tokens, width, out)
    integers = weight
    weight = backend.prepare_weight(weight, WeightUse("quant_linear_dynamic", "weight", dtype))
    deq_scale = backend.prepare_weight(scale, WeightUse("quant_linear_static", "deq_scale", dtype))
    bias = draw.integers(-(2**16), 2**16, out, dtype=torch.int32) if shifted else None
    x_scale = draw.integers(50, 200, tokens).float() * 1e-2
    weights_only = weight_only(backend, draw, integers, scale * 8, draw.normal(out) if shifted else None)
    samples: dict[str, Sample] = {
        "quantize": (hidden[0], *quantizer(draw, width, shifted=shifted)),
        "dynamic_quantize": (hidden[0],),
        "linear_int8": (hidden[0], *weights_only),
        "quant_linear_static": (x, weight, deq_scale, bias, dtype),
        "quant_linear_dynamic": (x, x_scale, weight, scale, draw.normal(out) if shifted else None, dtype),
        "add_rms_norm_quantize": (*hidden, *quantizer(draw, width, shifted=shifted)),
        "add_rms_norm_dynamic_quantize": hidden,
        "silu_and_mul_quantize": (draw.normal(tokens, 2 * width), *quantizer(draw, width, shifted=shifted)),
        "silu_and_mul_dynamic_quantize": (draw.normal(tokens, 2 * width),),
    }
    return samples[name]


def weight_only(
    backend: hal.Backend, draw: Draw, weight: Tensor, scale: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the weight, scales and bias of linear_int8 as the backend prepares them."""
    named = {"weight": weight, "weight_scale": scale, "bias": None if bias is None else bias.float()}
    return tuple(
        None if value is None else backend.prepare_weight(value, WeightUse("linear_int8", name, draw.dtype))
        for name, value in named.items()
    )


LAUNCHES = {
    "quantize": "Quantize",
    "dynamic_quantize": "DynamicQuantV2",
    "linear_int8": "WeightQuantBatchMatmulV2",
    "quant_linear_static": "QuantMatmulV5",
    "quant_linear_dynamic": "QuantMatmulV5",
    "add_rms_norm_quantize": "AddRmsNormQuantV2",
    "add_rms_norm_dynamic_quantize": "AddRmsNormDynamicQuantV2",
    "silu_and_mul_quantize": "DequantSwigluQuantV2",
    "silu_and_mul_dynamic_quantize": "DequantSwigluQuantV2",
}


def reference(name: str, sample: Sample) -> Any:
    """Return the reference's result for the kernel's arguments, converted back to their unprepared form."""
    return ops.operation(name).reference(*map(unpacked, on_cpu(map(in_nd, sample))))


def in_nd(value: Any) -> Any:
    import torch_npu

    if isinstance(value, Tensor) and torch_npu.get_npu_format(value) == FRACTAL_NZ:
        return torch_npu.npu_format_cast(value.t(), 2).t()
    return value


def unpacked(value: Any) -> Any:
    """A scale packed in 64 bits has its float32 in the low half."""
    if isinstance(value, Tensor) and value.dtype == torch.int64:
        return value.to(torch.int32).view(torch.float32)
    return value


def counted(run: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    torch.npu.synchronize()
    with emulator.trace() as trace:
        found = run()
        torch.npu.synchronize()
    assert not trace.ran("copy")
    return found, trace.counts()


def test_every_operation_on_int8_is_here() -> None:
    quantized = {name for name, each in ops.catalogue().items() if each.body.__module__.endswith("quantization")}
    assert quantized == set(LAUNCHES)


@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize("shifted", [False, True], ids=["", "shifted"])
@pytest.mark.parametrize("nz", [False, True], ids=["nd", "nz"])
@each_dtype()
class TestOneLaunch:
    def expected(self, name: str, shifted: bool, nz: bool) -> dict[str, int]:
        if name == "silu_and_mul_quantize" and shifted:
            return {"SwiGlu": 1, "Quantize": 1}
        launch = LAUNCHES[name]
        return {"QuantMatmulWeightNz" if nz and launch == "QuantMatmulV5" else launch: 1}

    @thorough(DTYPE, r"\[torch\.bfloat16")
    def test_eagerly(self, npu: Opened, dtype: torch.dtype, nz: bool, shifted: bool, name: str) -> None:
        backend = npu(options={"nz_weights": nz})
        for tokens in TOKENS:
            sample = arguments(backend, name, Draw(dtype, "npu", tokens), tokens, shifted=shifted)
            found, launches = counted(lambda given=sample: getattr(ops, name)(*given))
            assert launches == self.expected(name, shifted, nz)
            assert_agree(ops.operation(name), dtype, found, reference(name, sample), f"{tokens} tokens")

    @thorough(DTYPE, r"\[torch\.bfloat16")
    def test_in_a_graph(self, npu: Opened, dtype: torch.dtype, nz: bool, shifted: bool, name: str) -> None:
        """Capture once, and replay with new values."""
        backend = npu(options={"nz_weights": nz})
        sample = arguments(backend, name, Draw(dtype, "npu"), 5, shifted=shifted)
        graph = backend.graph()
        found = graph.capture(lambda: getattr(ops, name)(*sample))
        for seed in (1, 2):
            fresh = arguments(backend, name, Draw(dtype, "npu", seed), 5, shifted=shifted)
            sample[0].copy_(fresh[0])
            _, launches = counted(graph.replay)
            assert launches == self.expected(name, shifted, nz)
            assert_agree(ops.operation(name), dtype, found, reference(name, sample), f"seed {seed}")


@thorough(DRAW, r"\[seed=[2-9]")
@each_dtype()
@pytest.mark.parametrize("seed", range(6), ids="seed={}".format)
def test_shapes_at_random(npu: Opened, seed: int, dtype: torch.dtype) -> None:
    """Random projections, with plain weights and weights in FRACTAL_NZ, of sizes that do not fill tiles."""
    backend, draw = npu(options={"nz_weights": seed % 2 == 1}), Draw(dtype, "npu", seed)
    for _ in range(6):
        tokens, width, out = (int(draw.integers(1, most, 1)[0]) for most in (40, 300, 200))
        x, weight, scale = projection(draw, tokens, width, out)
        prepared = backend.prepare_weight(weight, WeightUse("quant_linear_dynamic", "weight", dtype))
        assert prepared.shape == weight.shape
        bias, x_scale = draw.integers(-999, 999, out, dtype=torch.int32), draw.integers(1, 99, tokens).float() / 100
        what = f"{tokens}x{width}x{out}"
        for added in (None, bias):
            deq_scale = backend.prepare_weight(scale, WeightUse("quant_linear_static", "deq_scale", dtype))
            found = backend.ops.quant_linear_static(x, prepared, deq_scale, added, dtype)
            right = ops.operation("quant_linear_static").reference(*on_cpu((x, weight, scale, added, dtype)))
            assert_agree(ops.operation("quant_linear_static"), dtype, found, right, what)
        for added in (None, draw.normal(out), draw.normal(out).float()):
            found = backend.ops.quant_linear_dynamic(x, x_scale, prepared, scale, added, dtype)
            right = ops.operation("quant_linear_dynamic").reference(*on_cpu((x, x_scale, weight, scale, added, dtype)))
            assert_agree(ops.operation("quant_linear_dynamic"), dtype, found, right, what)


@each_dtype()
@pytest.mark.parametrize("nz", [False, True], ids=["nd", "nz"])
def test_weights_only_at_random(npu: Opened, nz: bool, dtype: torch.dtype) -> None:
    """Scales and biases as prepared at load, and as they are, which costs launches that convert them."""
    import torch_npu

    backend, draw = npu(options={"nz_weights": nz}), Draw(dtype, "npu", int(nz))
    operation = ops.operation("linear_int8")
    for _ in range(6):
        tokens, width, out = (int(draw.integers(1, most, 1)[0]) for most in (40, 300, 200))
        _, weight, scale = projection(draw, tokens, width, out)
        x, scale, bias = draw.normal(tokens, width), scale * 8, draw.normal(out).float()
        right = operation.reference(*on_cpu((x, weight, scale, bias)))
        prepared = weight_only(backend, draw, weight, scale, bias)
        assert isinstance(prepared[0], Tensor)
        assert (torch_npu.get_npu_format(prepared[0]) == FRACTAL_NZ) == (nz and min(width, out) > 1)
        found, launches = counted(lambda x=x, given=prepared: backend.ops.linear_int8(x, *given))
        assert launches == {"WeightQuantBatchMatmulV2": 1}
        assert_agree(operation, dtype, found, right, f"{tokens}x{width}x{out}")
        assert_agree(operation, dtype, backend.ops.linear_int8(x, weight, scale, bias), right, "unprepared")
        folded = backend.ops.linear_int8(x.view(1, *x.shape), *prepared)
        assert torch.equal(folded.cpu(), found.cpu().unsqueeze(0))


@each_dtype()
def test_sums_that_float32_does_not_hold(npu: Opened, dtype: torch.dtype) -> None:
    """A sum beyond 2 ** 24 differs by 1 in the result if the bias cancels the rest."""
    backend, width = npu(), 2048
    x = torch.full((1, width), 127, dtype=torch.int8, device="npu")
    weight = torch.full((2, width), 127, dtype=torch.int8, device="npu")
    weight[1, 0] = 126
    x[0, 0] = 1
    bias = torch.full((2,), -127 * 127 * (width - 1), dtype=torch.int32, device="npu")
    deq_scale = backend.prepare_weight(
        torch.ones(2, device="npu"), WeightUse("quant_linear_static", "deq_scale", dtype)
    )
    assert backend.ops.quant_linear_static(x, weight, deq_scale, bias, dtype).tolist() == [[127, 126]]


class TestPrepared:
    @pytest.mark.parametrize("seed", range(3), ids="seed={}".format)
    def test_scales_for_float16_are_rounded_to_nearest(self, npu: Opened, seed: int) -> None:
        npu()
        scale = Draw(torch.float32, "npu", seed).normal(1000).abs() * 1e-4
        packed = prepared_deq_scale(scale, torch.float16).cpu()
        assert packed.dtype == torch.int64
        assert (packed >> 32 == 1 << 14).all()
        held = unpacked(packed)
        assert (held.view(torch.int32) & 0x1FFF == 0).all()
        off = ((held - scale.cpu()) / scale.cpu()).abs().max()
        assert 2**-12 < off <= 2**-11, "half a step of ten bits, where truncation would give a whole step"

    def test_scales_for_bfloat16_stay(self, npu: Opened) -> None:
        backend = npu()
        scale = torch.rand(8, device="npu")
        assert backend.prepare_weight(scale, WeightUse("quant_linear_static", "deq_scale", torch.bfloat16)) is scale

    def test_a_scale_as_it_is_works_and_costs_a_launch(self, npu: Opened) -> None:
        backend = npu()
        x, weight, scale = projection(Draw(torch.float16, "npu"), 3, 64, 32)
        sample = (x, weight, scale, None, torch.float16)
        found, launches = counted(lambda: backend.ops.quant_linear_static(*sample))
        assert launches == {"TransQuantParamV3": 1, "QuantMatmulV5": 1}
        assert_agree(
            ops.operation("quant_linear_static"), torch.float16, found, reference("quant_linear_static", sample)
        )

    def test_weights_in_fractal_nz(self, npu: Opened) -> None:
        import torch_npu

        backend = npu(options={"nz_weights": True})
        for out, width in ((96, 64), (1, 64), (96, 1), (40, 24)):
            weight = Draw(torch.float16, "npu").integers(-127, 128, out, width, dtype=torch.int8)
            prepared = backend.prepare_weight(weight, WeightUse("quant_linear_dynamic", "weight", torch.float16))
            assert prepared.shape == weight.shape
            nz = torch_npu.get_npu_format(prepared) == FRACTAL_NZ
            assert nz == (min(out, width) > 1), "CANN does not support dimensions of size 1"
            assert torch_npu.get_npu_format(weight) != FRACTAL_NZ
        x, thin = torch.ones(2, 64, dtype=torch.int8, device="npu"), torch.ones(64, 1, dtype=torch.int8, device="npu")
        with pytest.raises(RuntimeError, match="FRACTAL_NZ must have no dimension of size 1"):
            torch_npu.npu_quant_matmul(
                x, torch_npu.npu_format_cast(thin, FRACTAL_NZ), torch.ones(1, device="npu"), output_dtype=torch.bfloat16
            )

    def test_weights_stay_without_the_option(self, npu: Opened) -> None:
        weight = torch.ones(96, 64, dtype=torch.int8, device="npu")
        assert npu().prepare_weight(weight, WeightUse("quant_linear_static", "weight", torch.float16)) is weight


class TestWhereItIsParticular:
    @each_dtype()
    @pytest.mark.parametrize("width", [4912, 4916, 12288])
    def test_a_wide_activation_takes_two_launches(self, npu: Opened, width: int, dtype: torch.dtype) -> None:
        """npu_dequant_swiglu_quant keeps ten rows on the chip, and refuses wider ones."""
        backend, draw = npu(), Draw(dtype, "npu")
        x, scale = draw.normal(3, 2 * width), torch.full((width,), 0.02, device="npu")
        for name, sample, second in (
            ("silu_and_mul_quantize", (x, scale, None), "Quantize"),
            ("silu_and_mul_dynamic_quantize", (x,), "DynamicQuantV2"),
        ):
            found, launches = counted(lambda name=name, given=sample: getattr(backend.ops, name)(*given))
            assert launches == ({"DequantSwigluQuantV2": 1} if width < 4916 else {"SwiGlu": 1, second: 1})
            assert_agree(ops.operation(name), dtype, found, reference(name, sample))

    @each_dtype()
    def test_a_scale_of_one_element_after_a_norm_takes_two(self, npu: Opened, dtype: torch.dtype) -> None:
        backend, draw = npu(), Draw(dtype, "npu")
        hidden = draw.normal(3, 64), draw.normal(3, 64), draw.normal(64), EPS
        sample = (*hidden, torch.full((1,), 0.02, device="npu"), None)
        found, launches = counted(lambda: backend.ops.add_rms_norm_quantize(*sample))
        assert launches == {"AddRmsNorm": 1, "Quantize": 1}
        assert_agree(ops.operation("add_rms_norm_quantize"), dtype, found, reference("add_rms_norm_quantize", sample))

    @each_dtype()
    def test_rows_of_zeros_and_of_more_dimensions(self, npu: Opened, dtype: torch.dtype) -> None:
        backend, draw = npu(), Draw(dtype, "npu")
        x = draw.normal(2, 3, 64)
        x[1, 1] = 0
        for name in ("dynamic_quantize", "silu_and_mul_dynamic_quantize"):
            quantized, scale = getattr(backend.ops, name)(x)
            assert scale[1, 1].item() == 0
            assert not quantized[1, 1].any()
            assert_agree(ops.operation(name), dtype, (quantized, scale), reference(name, (x,)))

    @each_dtype()
    def test_what_is_not_finite_shows(self, npu: Opened, dtype: torch.dtype) -> None:
        backend, draw = npu(), Draw(dtype, "npu")
        _, weight, scale = projection(draw, 1, 64, 32)
        for bad in (float("nan"), float("inf"), float("-inf")):
            x = draw.normal(3, 64)
            x[1, 5] = bad
            quantized, x_scale = backend.ops.dynamic_quantize(x)
            found = backend.ops.quant_linear_dynamic(quantized, x_scale, weight, scale, None, dtype)
            assert not found[1].isfinite().any()
            assert found[0].isfinite().all()
            assert found[2].isfinite().all()

    @thorough(DRAW, r"schedule=[1-9]")
    @pytest.mark.parametrize("seed", range(3), ids="schedule={}".format)
    @pytest.mark.parametrize("name", LAUNCHES)
    def test_under_any_schedule(self, npu: Opened, name: str, seed: int) -> None:
        backend = npu()
        sample = arguments(backend, name, Draw(torch.bfloat16, "npu", seed), 9)
        with emulator.schedule(seed):
            found = getattr(backend.ops, name)(*sample)
            assert_agree(ops.operation(name), torch.bfloat16, found, reference(name, sample))

    def test_the_steps_of_an_int8_result_are_bounded(self) -> None:
        """Tests the comparison itself: few values may differ by one step, none by two."""
        operation = ops.operation("quantize")
        right = torch.zeros(1000, dtype=torch.int8)
        for wrong, step, passes in ((0, 0, True), (11, 1, True), (12, 1, False), (1, 2, False), (1, -1, True)):
            found = right.clone()
            found[:wrong] = step
            if passes:
                assert_agree(operation, torch.float32, found, right)
                continue
            with pytest.raises(AssertionError, match=r"off by one|2 times the allowed difference"):
                assert_agree(operation, torch.float32, found, right)
