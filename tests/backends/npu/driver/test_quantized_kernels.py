"""Tests for the NPU's kernels that round to int8: launches, eager and in graphs. test_npu_forms.py has projections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import emulated_cann
import pytest
import torch
from helpers.kernel_checks import on_cpu
from helpers.thorough import DTYPE, thorough
from torch import Tensor

import hal
from hal import ops
from hal.ops import Draw, Sample
from hal.ops.tolerance import assert_agree

DTYPES = (torch.float16, torch.bfloat16)
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


def arguments(name: str, draw: Draw, tokens: int, *, shifted: bool = False) -> Sample:
    """Return the arguments with which a model of width 192 calls the operation."""
    width = 192
    hidden = draw.normal(tokens, width), draw.normal(tokens, width), draw.normal(width), EPS
    samples: dict[str, Sample] = {
        "quantize": (hidden[0], *quantizer(draw, width, shifted=shifted)),
        "dynamic_quantize": (hidden[0],),
        "add_rms_norm_quantize": (*hidden, *quantizer(draw, width, shifted=shifted)),
        "add_rms_norm_dynamic_quantize": hidden,
        "silu_and_mul_quantize": (draw.normal(tokens, 2 * width), *quantizer(draw, width, shifted=shifted)),
        "silu_and_mul_dynamic_quantize": (draw.normal(tokens, 2 * width),),
    }
    return samples[name]


LAUNCHES = {
    "quantize": "Quantize",
    "dynamic_quantize": "DynamicQuantV2",
    "add_rms_norm_quantize": "AddRmsNormQuantV2",
    "add_rms_norm_dynamic_quantize": "AddRmsNormDynamicQuantV2",
    "silu_and_mul_quantize": "DequantSwigluQuantV2",
    "silu_and_mul_dynamic_quantize": "DequantSwigluQuantV2",
}


def reference(name: str, sample: Sample) -> Any:
    """Return the reference's result for the kernel's arguments."""
    return ops.operation(name).reference(*on_cpu(sample))


def counted(run: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    torch.npu.synchronize()
    with emulated_cann.trace() as trace:
        found = run()
        torch.npu.synchronize()
    assert not trace.ran("copy")
    return found, trace.counts()


def test_every_operation_on_int8_is_here() -> None:
    quantized = {name for name, each in ops.catalogue().items() if each.body.__module__.endswith("quantization")}
    assert quantized - {"float8_quantize"} == set(LAUNCHES)  # which no operator computes


@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize("shifted", [False, True], ids=["", "shifted"])
@each_dtype()
class TestOneLaunch:
    def expected(self, name: str, shifted: bool) -> dict[str, int]:
        if name == "silu_and_mul_quantize" and shifted:
            return {"SwiGlu": 1, "Quantize": 1}
        return {LAUNCHES[name]: 1}

    @thorough(DTYPE, r"\[torch\.bfloat16")
    def test_eagerly(self, npu: Opened, dtype: torch.dtype, shifted: bool, name: str) -> None:
        npu()
        for tokens in TOKENS:
            sample = arguments(name, Draw(dtype, "npu", tokens), tokens, shifted=shifted)
            found, launches = counted(lambda given=sample: getattr(ops, name)(*given))
            assert launches == self.expected(name, shifted)
            assert_agree(ops.operation(name), dtype, found, reference(name, sample), f"{tokens} tokens")

    @thorough(DTYPE, r"\[torch\.bfloat16")
    def test_in_a_graph(self, npu: Opened, dtype: torch.dtype, shifted: bool, name: str) -> None:
        """Capture once, and replay with new values."""
        backend = npu()
        sample = arguments(name, Draw(dtype, "npu"), 5, shifted=shifted)
        graph = backend.graph()
        found = graph.capture(lambda: getattr(ops, name)(*sample))
        for seed in (1, 2):
            fresh = arguments(name, Draw(dtype, "npu", seed), 5, shifted=shifted)
            sample[0].copy_(fresh[0])
            _, launches = counted(graph.replay)
            assert launches == self.expected(name, shifted)
            assert_agree(ops.operation(name), dtype, found, reference(name, sample), f"seed {seed}")


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
