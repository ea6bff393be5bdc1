"""Tests of latent attention with its projections, absorbed and expanded, against loops in float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.paged_step import Step
from torch import Tensor

import hal
from hal import ops
from hal.ops import AttentionOptions

SEED = random.randrange(1 << 30)
NAME = "multi_head_latent_attention"
Call = Sequence[Any]


@pytest.fixture(params=["reference", "cpu"])
def kernel(request: pytest.FixtureRequest, cpu: hal.Backend) -> Callable[..., Tensor]:
    return ops.operation(NAME).reference if request.param == "reference" else cpu.kernels[NAME]


def call(step: Step, heads: int, nope: int, rope: int, rank: int, value: int) -> tuple[Call, Tensor]:
    """Return random arguments, and the result in float64."""
    rows = step.normal(step.tokens + step.padding, heads, nope + rope)
    keys, values = (step.normal(heads, size, rank) * rank**-0.5 for size in (nope, value))
    (latents, held), (ropes, turned) = step.cache(rank), step.cache(rope)
    wanted, scale = torch.zeros(step.tokens + step.padding, heads, value), (nope + rope) ** -0.5
    start = 0
    for new, length, latent, shared in zip(step.new, step.lens, held, turned, strict=True):
        at, start = slice(start, start + new), start + new
        own = torch.cat((latent @ keys.double().mT, shared.expand(heads, -1, -1)), -1)  # [heads, positions, both]
        scores = rows[at].double().transpose(0, 1) @ own.mT * scale
        hidden = torch.arange(length) > torch.arange(length - new, length)[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        wanted[at] = (weights @ (latent @ values.double().mT)).transpose(0, 1).float()
    lengths = step.starts, step.kv_lens, step.starts, step.kv_lens
    caches = latents, ropes, keys, values, step.table
    return (rows[..., :nope], rows[..., nope:], *caches, *lengths, AttentionOptions(scale)), wanted


def absorbed(kernels: dict[str, Callable[..., Any]], arguments: Call) -> Tensor:
    """Return the result of the absorbed form's kernels."""
    query, rope, latents, ropes, keys, values, *others = arguments
    attended = kernels["latent_attention"](kernels["head_linear"](query, keys), rope, latents, ropes, *others)
    result: Tensor = kernels["head_linear"](attended, values.transpose(1, 2))
    return result


@pytest.mark.parametrize("case", range(16))
def test_each_head_attends_to_projected_latents(kernel: Callable[..., Tensor], cpu: hal.Backend, case: int) -> None:
    """Prompts whole and in chunks, decodes after a prefix, in one step, with and without rotary rows."""
    step = Step(SEED + case, queries=(0, 1, 1, 7, 40, 90), cached=(0, 0, 5, 60, 300))
    choose = step.random.choice
    sizes = choose((1, 5, 16)), choose((8, 24, 128)), choose((0, 8, 64)), choose((40, 256)), choose((16, 40, 128))
    arguments, wanted = call(step, *sizes)
    found = kernel(*arguments)
    assert found.is_contiguous()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, absorbed(cpu.kernels, arguments), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_long_prompt_is_expanded_in_parts(cpu: hal.Backend, dtype: torch.dtype) -> None:
    """The expanded keys and values of a sequence take more memory than a kernel uses for them."""
    step = Step(SEED, queries=(110,), cached=(1000,), sequences=(1,))
    arguments, _ = call(step, 128, 8, 8, 256, 128)
    narrow = [each.to(dtype) if isinstance(each, Tensor) and each.is_floating_point() else each for each in arguments]
    wide = [each.float() if isinstance(each, Tensor) and each.is_floating_point() else each for each in narrow]
    bound = max(1e-4, 8 * torch.finfo(dtype).eps)
    found = cpu.kernels[NAME](*narrow).float()
    torch.testing.assert_close(found, absorbed(cpu.kernels, wide), rtol=bound, atol=bound)
