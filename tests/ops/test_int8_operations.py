"""Tests for int8 operations: references against explicit arithmetic, and the CPU's kernels against the references."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from fractions import Fraction

import numpy
import pytest
import torch
from torch import Tensor

import hal
from hal import ops
from hal.ops import Draw
from hal.ops.form_samples import INT8_DYNAMIC, INT8_STATIC

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def each_dtype() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("dtype", DTYPES, ids=str)


def each_seed(count: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("seed", range(count), ids="seed={}".format)


def rounded(value: Fraction) -> int:
    """Round to the nearest integer, half to even, and convert to int8."""
    return min(127, max(-128, round(value)))  # Python rounds half to even.


def static(
    run: Callable[..., Tensor], x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return run(x, weight, bias, scale.unsqueeze(-1), None, None, dtype, INT8_STATIC)


def dynamic(
    run: Callable[..., Tensor],
    x: Tensor,
    by_token: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return run(x, weight, bias, scale.unsqueeze(-1), None, by_token, dtype, INT8_DYNAMIC)


def int8s(draw: Draw, *shape: int) -> Tensor:
    return draw.integers(-128, 128, *shape, dtype=torch.int8)


class TestQuantize:
    @each_dtype()
    @each_seed(3)
    def test_against_exact_fractions(self, cpu: hal.Backend, seed: int, dtype: torch.dtype) -> None:
        """With scales that are powers of 2, quotients are exact, and many are ties."""
        draw = Draw(dtype, seed=seed)
        for exponent, offset in itertools.product((-6, -3, 0), (None, -128, -7, 0, 127)):
            x = draw.integers(-600, 600, 200).to(dtype) * 2.0 ** (exponent - 1)
            shift = None if offset is None else draw.tensor([offset], torch.int32)
            found = cpu.ops.quantize(x, torch.tensor([2.0**exponent]), shift)
            exact = [rounded(Fraction(value) / Fraction(2) ** exponent + (offset or 0)) for value in x.tolist()]
            assert found.dtype == torch.int8
            assert found.tolist() == exact

    def test_it_divides(self, cpu: hal.Backend) -> None:
        """Multiplication by the reciprocal would differ, because float32 does not represent 1 / 41."""
        x = torch.arange(-128, 128) * 41.0 / 2
        scale = torch.tensor([41.0])
        found = cpu.ops.quantize(x, scale, None)
        assert found.tolist() == [rounded(Fraction(value) / 41) for value in x.tolist()]
        assert not torch.equal(found, (x * (1 / scale)).round().clamp(-128, 127).to(torch.int8))

    def test_a_repeated_scale_is_the_same(self, cpu: hal.Backend) -> None:
        x, scale, offset = Draw().normal(4, 32), torch.tensor([0.03]), torch.tensor([5], dtype=torch.int32)
        repeated = cpu.ops.quantize(x, scale.expand(32).contiguous(), offset.expand(32).contiguous())
        assert torch.equal(repeated, cpu.ops.quantize(x, scale, offset))

    def test_no_offset_is_an_offset_of_0(self, cpu: hal.Backend) -> None:
        x, scale = Draw().normal(4, 32), torch.tensor([0.03])
        zero = torch.zeros(1, dtype=torch.int32)
        assert torch.equal(cpu.ops.quantize(x, scale, None), cpu.ops.quantize(x, scale, zero))

    def test_infinities_are_clamped(self, cpu: hal.Backend) -> None:
        x = torch.tensor([math.inf, -math.inf, 1e38, -1e38])
        assert cpu.ops.quantize(x, torch.tensor([1e-3]), None).tolist() == [127, -128, 127, -128]


class TestDynamicQuantize:
    @each_dtype()
    @each_seed(3)
    def test_the_largest_becomes_127(self, cpu: hal.Backend, seed: int, dtype: torch.dtype) -> None:
        x = Draw(dtype, seed=seed).normal(50, 64, scale=10.0 ** (seed - 1))
        found, scale = cpu.ops.dynamic_quantize(x)
        assert torch.equal(scale, x.float().abs().amax(-1) / 127)
        assert (found.int().abs().amax(-1) == 127).all()
        assert not (found == -128).any()
        off = (found.float() * scale[:, None] - x.float()).abs()
        assert (off <= scale[:, None] * 0.501).all()

    def test_a_row_of_zeros(self, cpu: hal.Backend) -> None:
        found, scale = cpu.ops.dynamic_quantize(torch.zeros(2, 8))
        assert not found.any()
        assert scale.tolist() == [0, 0]

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_shows_in_the_projection(self, cpu: hal.Backend, bad: float) -> None:
        x = Draw().normal(3, 16)
        x[1, 3] = bad
        quantized, scale = cpu.ops.dynamic_quantize(x)
        weight, ones = int8s(Draw(), 8, 16), torch.ones(8)
        found = dynamic(cpu.ops.linear, quantized, scale, weight, ones, None, torch.float32)
        assert not found[1].isfinite().any()
        assert found[0::2].isfinite().all()

    def test_a_token_does_not_depend_on_the_others(self, cpu: hal.Backend) -> None:
        x = Draw(torch.bfloat16).normal(9, 32)
        together, scales = cpu.ops.dynamic_quantize(x)
        for row in range(9):
            alone, scale = cpu.ops.dynamic_quantize(x[row : row + 1])
            assert torch.equal(alone[0], together[row])
            assert torch.equal(scale[0], scales[row])


class TestProjections:
    def drawn(self, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Draw x, weight, int32 bias, a scale per output and one per token, of a random shape."""
        draw, choose = Draw(seed=seed), random.Random(seed)
        tokens, width, out = choose.choice((0, 1, 2, 17)), choose.choice((1, 2, 31, 64, 1000)), choose.randint(1, 70)
        bias = draw.integers(-(2**30), 2**30, out, dtype=torch.int32)
        scale, by_token = draw.integers(1, 999, out).float() * 1e-6, draw.integers(1, 999, tokens).float() / 300
        return int8s(draw, tokens, width), int8s(draw, out, width), bias, scale, by_token

    @each_dtype()
    @each_seed(12)
    def test_against_numpys_integers(self, cpu: hal.Backend, seed: int, dtype: torch.dtype) -> None:
        """Reference and kernel are equal bit for bit: sums in 64 bits, and the declared float32 operations in order."""
        x, weight, bias, scale, by_token = self.drawn(seed)
        exact = x.numpy().astype(numpy.int64) @ weight.numpy().astype(numpy.int64).T
        for added in (None, bias):
            sums = exact if added is None else exact + added.numpy()
            right = torch.from_numpy(sums.astype(numpy.float32) * scale.numpy()).to(dtype)
            for run in (ops.operation("linear").reference, cpu.ops.linear):
                found = static(run, x, weight, scale, added, dtype)
                assert found.dtype == dtype
                assert torch.equal(found, right)
        for add in (None, bias.float() / 2**28, (bias.float() / 2**28).to(dtype)):
            values = exact.astype(numpy.float32) * scale.numpy() * by_token.numpy()[:, None]
            right = torch.from_numpy(values if add is None else values + add.float().numpy()).to(dtype)
            for run in (ops.operation("linear").reference, cpu.ops.linear):
                assert torch.equal(dynamic(run, x, by_token, weight, scale, add, dtype), right)

    def test_the_widest_sums_do_not_overflow(self, cpu: hal.Backend) -> None:
        """16384 extreme products stay below 2 ** 31, far beyond the integers that float32 represents."""
        width = 16384
        for first, second in itertools.product((-128, 127), repeat=2):
            x = torch.full((1, width), first, dtype=torch.int8)
            weight = torch.full((3, width), second, dtype=torch.int8)
            x[0, 0] += 1 if first < 0 else -1
            bias = torch.full((3,), -first * second * width, dtype=torch.int32)
            one = torch.ones(3)
            found = static(cpu.ops.linear, x, weight, one, bias, torch.float32)
            assert found.tolist() == [[second if first < 0 else -second] * 3]

    @pytest.mark.parametrize("shape", [(1, 64), (1, 1), (5, 1), (3, 64)], ids=str)
    def test_strides_that_could_be_either_dimensions(self, cpu: hal.Backend, shape: tuple[int, int]) -> None:
        tokens, width = shape
        x, weight = int8s(Draw(), width, tokens).t(), int8s(Draw(seed=1), 8, width)
        found = static(cpu.ops.linear, x, weight, torch.ones(8), None, torch.float32)
        assert torch.equal(found, (x.int() @ weight.int().t()).float())

    def test_more_dimensions(self, cpu: hal.Backend) -> None:
        draw = Draw()
        x, weight, scale = int8s(draw, 2, 3, 64), int8s(draw, 8, 64), torch.rand(8)
        by_token = torch.rand(2, 3)
        flat = dynamic(cpu.ops.linear, x.flatten(0, 1), by_token.flatten(), weight, scale, None, torch.float32)
        found = dynamic(cpu.ops.linear, x, by_token, weight, scale, None, torch.float32)
        assert torch.equal(found, flat.view(2, 3, 8))

    @each_seed(4)
    def test_a_float_projection_is_recovered(self, cpu: hal.Backend, seed: int) -> None:
        """Scale, offset and bias are folded at load as the declaration specifies; static and dynamic."""
        draw = Draw(seed=seed)
        x, weight, bias = draw.normal(20, 128), draw.normal(48, 128, scale=0.1), draw.normal(48)
        x = x + 0.7  # An offset reduces the error here.
        right = x @ weight.t() + bias
        weight_scale = weight.abs().amax(-1) / 127
        integers = (weight / weight_scale[:, None]).round().to(torch.int8)

        low, high = x.amin(), x.amax()
        x_scale = ((high - low) / 255).view(1)
        offset = (-128 - low / x_scale).round().to(torch.int32)
        deq_scale = x_scale * weight_scale
        quant_bias = (bias / deq_scale).round().to(torch.int32) - offset * integers.int().sum(-1, dtype=torch.int32)
        by_scale = static(
            cpu.ops.linear, cpu.ops.quantize(x, x_scale, offset), integers, deq_scale, quant_bias, torch.float32
        )
        by_row = dynamic(cpu.ops.linear, *cpu.ops.dynamic_quantize(x), integers, weight_scale, bias, torch.float32)
        for found in (by_scale, by_row):
            assert ((found - right).square().mean() / right.square().mean()).sqrt() < 0.02

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_on_a_tape(self, cpu: hal.Backend, dtype: torch.dtype) -> None:
        """Captured with one token's values, replayed with another's."""
        draw = Draw(dtype)
        x, weight, scale = draw.normal(4, 64), int8s(draw, 32, 64), torch.rand(32) * 1e-3
        input_scale = torch.full((64,), 0.02)

        def step() -> tuple[Tensor, Tensor]:
            by_scale = static(ops.linear, ops.quantize(x, input_scale, None), weight, scale, None, dtype)
            return by_scale, dynamic(ops.linear, *ops.dynamic_quantize(x), weight, scale, None, dtype)

        graph = cpu.graph()
        found = graph.capture(step)
        for seed in (1, 2):
            x.copy_(Draw(dtype, seed=seed).normal(4, 64))
            graph.replay()
            for got, right in zip(found, step(), strict=True):
                assert torch.equal(got, right)


@pytest.mark.parametrize("name", ["add_rms_norm", "silu_and_mul"])
@pytest.mark.parametrize("way", ["quantize", "dynamic_quantize"])
@each_dtype()
def test_fused_ones_are_their_parts(cpu: hal.Backend, dtype: torch.dtype, way: str, name: str) -> None:
    draw = Draw(dtype)
    first = (draw.normal(5, 64), draw.normal(5, 64), draw.normal(64), 1e-6)
    given = first if name == "add_rms_norm" else (draw.normal(5, 128),)
    quantizer = (torch.full((64,), 0.02), torch.full((64,), 3, dtype=torch.int32)) if way == "quantize" else ()
    fused = ops.operation(f"{name}_{way}").reference(*given, *quantizer)
    alone = ops.operation(name).reference(*given)
    before, hidden = alone if isinstance(alone, tuple) else (alone, None)
    after = ops.operation(way).reference(before, *quantizer)
    expected = [*(after if isinstance(after, tuple) else (after,)), *([] if hidden is None else [hidden])]
    for got, right in zip(fused if isinstance(fused, tuple) else (fused,), expected, strict=True):
        assert torch.equal(got, right)


@pytest.mark.parametrize("fixed", [False, True])
def test_a_dtype_goes_through_a_trace(cpu: hal.Backend, fixed: bool) -> None:
    """The dtype is an argument of the node, and one compilation serves any size."""
    weight, scale = int8s(Draw(), 8, 64), torch.rand(8)

    def run(x: Tensor, by_token: Tensor) -> Tensor:
        if fixed:
            return static(ops.linear, x, weight, scale, None, torch.bfloat16)
        return dynamic(ops.linear, x, by_token, weight, scale, None, torch.bfloat16)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (1, 4, 9):
        sample = int8s(Draw(), tokens, 64), torch.rand(tokens)
        assert torch.equal(compiled(*sample), run(*sample))
