"""Tests for rewrites: where they apply, for any spelling of the code, where they are skipped, and pass reports."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hal.models.qwen3 import Qwen3ForCausalLM
from helpers.rewriting import Spelling, Traced, copied, mixture, rewrite_of, trace
from helpers.stepping import states_of
from helpers.thorough import AGAIN, DRAW, EXHAUSTIVE, thorough
from torch import Tensor

import hal
from hal import ops
from hal.compile.rewrite.proof import check_rewrite
from hal.compile.rewrite.rewrite import fusions
from hal.compile.trace import StepSizes, trace_step
from hal.ops.declaration.constraints import Draw
from hal.step import Batch

FUSED = [name for name, operation in ops.catalogue().items() if operation.fused]
SIZES = (1, 2, 3, 5, 17, 64, 129, 257)


@thorough(EXHAUSTIVE, r"\[(expert_mlp|add_rms_norm_quantize)")
@thorough(AGAIN, r"\[(?!add_rms_norm\])")
@thorough(EXHAUSTIVE, r"\[quant_expert_mlp")
@pytest.mark.parametrize("name", FUSED)
def test_every_fused_operation_is_proved(name: str) -> None:
    check_rewrite(rewrite_of(name))


@thorough(DRAW, r"\[([3-9]|\d\d)\]")
@pytest.mark.parametrize("seed", range(24))
def test_any_spelling_for_any_number_of_tokens(seed: int) -> None:
    spelling = Spelling(seed)
    traced = trace(spelling.layer, *spelling.inputs(4), rows=spelling.rows)
    report = traced.apply(*spelling.fused)
    applied = {each.name: len(each.matches) for each in report.passes}
    assert applied == spelling.fused, f"{report}\n{traced.graph.graph}"
    for tokens in random.Random(seed).sample(SIZES, 3):
        traced.check(spelling.inputs(tokens))


@pytest.mark.parametrize("how", ["scale", "scale and offset", "dynamic"])
def test_a_quantised_layer(how: str) -> None:
    def quantized(x: Tensor, scale: Tensor, offset: Tensor) -> tuple[Tensor, ...]:
        if how == "dynamic":
            return ops.dynamic_quantize(x)
        return (ops.quantize(x, scale, offset if how == "scale and offset" else None),)

    def function(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, offset: Tensor) -> Any:
        hidden = residual.exp()
        hidden += x
        given = quantized(ops.rms_norm(hidden, weight, 1e-5), scale, offset)
        inner = quantized(ops.silu_and_mul(torch.cat([hidden, hidden], dim=-1)), scale, offset)
        return *given, *inner, hidden

    draw = Draw(torch.bfloat16, seed=8)
    scale, offset = torch.tensor([0.0234375]), torch.tensor([-7], dtype=torch.int32)
    traced = trace(function, draw.normal(4, 64), draw.normal(4, 64), draw.normal(64), scale, offset, rows=(0, 1))
    report = traced.apply(*fusions_in_order())
    kind = "dynamic_quantize" if how == "dynamic" else "quantize"
    applied = {each.name: len(each.matches) for each in report.passes if each.matches}
    assert applied == {f"add_rms_norm_{kind}": 1, f"silu_and_mul_{kind}": 1}, report
    traced.check()


def test_sizes_of_the_spellings() -> None:
    """The seeds above cover every ratio of sizes, and every pair of other choices."""
    configs = [Spelling(seed).config for seed in range(24)]
    assert {each["ratio"] for each in configs} == set(range(1, 9))
    for one, other in itertools.combinations(("head_dim", "eps", "bias", "dtype"), 2):
        assert len({(each[one], each[other]) for each in configs}) == 4, (one, other)


@thorough(DRAW, r"\[(2|7)\]")
@pytest.mark.parametrize("tokens", [1, 2, 7, 257])
def test_for_a_number_of_tokens_that_is_fixed(tokens: int) -> None:
    spelling = Spelling(tokens)
    traced = trace(spelling.layer, *spelling.inputs(tokens))
    report = traced.apply(*spelling.fused)
    assert {each.name: len(each.matches) for each in report.passes} == spelling.fused, report
    traced.check()


@pytest.mark.parametrize("seed", range(2))
def test_a_second_time_changes_nothing(seed: int) -> None:
    spelling = Spelling(100 + seed)
    traced = trace(spelling.layer, *spelling.inputs(4), rows=spelling.rows)
    traced.apply(*spelling.fused)
    before = str(traced.graph.graph)
    report = traced.apply(*spelling.fused)
    assert [each.matches for each in report.passes] == [(), ()]
    assert str(traced.graph.graph) == before


@thorough(DRAW, r"\[range\([1-9]")
@pytest.mark.parametrize("seeds", [range(first, first + 15) for first in range(0, 60, 15)], ids=str)
def test_any_order_of_views_writes_and_sums(seeds: range) -> None:
    """Random programs: rewriting never changes the result, whether or not it applies."""
    applied = 0
    for seed in seeds:
        x = torch.arange(96.0).view(4, 24) / 50
        traced = trace(mixture(seed, steps=20), x, x * 0.7, rows=(0, 1))
        applied += len(traced.apply("add_rms_norm").passes[0].matches)
        traced.check()
    assert applied


def test_nothing_is_assumed_of_sizes() -> None:
    """Rewriting adds no guard to the trace, and specializes no size."""
    for seed in range(3):
        spelling = Spelling(200 + seed)
        traced = trace(spelling.layer, *spelling.inputs(4), rows=spelling.rows)
        sizes = traced.mode.shape_env
        known = list(sizes.guards), dict(sizes.replacements)
        traced.apply(*FUSED)
        assert (list(sizes.guards), dict(sizes.replacements)) == known


def model_of(head_dim: int, ratio: int, eps: float, layers: int = 2, bias: bool = False) -> torch.nn.Module:
    config = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "rms_norm_eps": eps,
        "num_attention_heads": ratio,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "attention_bias": bias,
        "max_position_embeddings": 512,
    }
    model = Qwen3ForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(ratio)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def batch_of(lengths: list[int], cached: list[int], seed: int) -> Batch:
    """Return a batch of sequences with new tokens after cached ones, each in its own blocks."""
    draw = Draw(seed=seed)
    owned = [max(-(-(new + old) // 16), 2) for new, old in zip(lengths, cached, strict=True)]
    starts = [sum(owned[:index]) for index in range(len(owned))]
    blocks = [list(range(start, start + count)) for start, count in zip(starts, owned, strict=True)]
    tokens = [draw.integers(0, 50, length).tolist() for length in lengths]
    return Batch.build(tokens, blocks, block_size=16, cached=cached)


@thorough(DRAW, r"\[(64-4|128-8)")
@pytest.mark.parametrize(
    ("head_dim", "ratio", "eps", "bias"),
    [(64, 1, 1e-6, False), (128, 2, 1e-5, True), (64, 4, 1e-5, False), (128, 8, 1e-6, True)],
)
def test_a_model_in_decode_and_prefill(head_dim: int, ratio: int, eps: float, bias: bool) -> None:
    model = model_of(head_dim, ratio, eps, bias=bias)
    step = trace_step(model, states_of(model), StepSizes(None), whole=ops.catalogue(), decompose=False)
    traced = Traced(step.graph, step.mode, (), copied(step.graph))
    report = traced.apply(*fusions_in_order())
    assert len(report["add_rms_norm"].matches) == 2 * len(model.states)
    assert len(report["split_qkv_rmsnorm_rope_cache"].matches) == len(model.states)
    for seed, (lengths, cached) in enumerate(
        [([1], [5]), ([1] * 3, [0, 20, 31]), ([1] * 257, [7] * 257), ([1, 33, 5], [0] * 3), ([2, 40], [30, 0])]
    ):
        batch = batch_of(lengths, cached, seed)
        states = states_of(model, 2 * len(lengths) + 8)
        with torch.inference_mode():
            caches = [each.normal_() for _, each in states.tensors()]
        traced.check([*batch.tensors(), *step.fixed[: -len(caches)], *caches])


def fusions_in_order() -> list[str]:
    """Return the fused operations, largest first, as for a backend with kernels for all of them."""
    cpu = hal.open("cpu")
    every = hal.Backend("every", cpu.device, kernels=dict.fromkeys(FUSED, print))
    return [each.name for each in fusions(every)]


def test_what_takes_most_in_comes_first() -> None:
    order = fusions_in_order()
    assert order.index("split_qkv_rmsnorm_rope_cache") < order.index("split_qkv_rmsnorm_rope")
    assert order.index("add_rms_norm_quantize") < order.index("add_rms_norm")
