"""What the tests of steps in pieces share, on every device: runners, batches, and the step to compare with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

import hal
from hal.nn import Batch, CausalLM
from hal.runtime.markers import MarkedStep
from hal.runtime.pieces import PiecewiseStep


def step_of(runner: hal.Runner, phase: str) -> PiecewiseStep:
    """What runs a phase, which is in pieces."""
    step = runner._decode if phase == "decode" else runner._prefill
    assert isinstance(step, PiecewiseStep)
    return step


def uncaptured(model: CausalLM, backend: hal.Backend) -> hal.Runner:
    """A runner with nothing captured, on a backend whose config stays as it is."""
    config = backend.config
    backend.configure(attrs.evolve(config, compilation=hal.CompilationConfig()))
    runner = hal.Runner(model, backend)
    backend.configure(config)
    return runner


def marked(model: CausalLM, backend: hal.Backend) -> hal.Runner:
    """A runner whose steps are split by markers, without a compiler."""
    runner = uncaptured(model, backend)
    runner._decode = MarkedStep(model, backend, runner.cache, "decode")
    runner._prefill = MarkedStep(model, backend, runner.cache, "prefill")
    return runner


@torch.inference_mode()
def eagerly(runner: hal.Runner, batch: Batch) -> Tensor:
    """The model's own Python, on the same cache."""
    return runner.model(batch, runner.cache.layers)


def drawn(runner: hal.Runner, seed: int, lengths: Sequence[int], cached: Sequence[int], **more: Any) -> Batch:
    """A batch of new tokens behind cached ones, in blocks from all over. What is cached is computed eagerly."""
    draw = random.Random(seed)
    free = list(range(1, runner.spec.num_blocks))
    draw.shuffle(free)
    blocks = [[free.pop() for _ in range(runner.spec.blocks_for(a + b))] for a, b in zip(lengths, cached, strict=True)]
    for length, own in zip(cached, blocks, strict=True):
        if length:
            tokens = [draw.randrange(runner.model.vocab_size) for _ in range(length)]
            eagerly(runner, runner.batch([tokens], [own]))
    new = [[draw.randrange(runner.model.vocab_size) for _ in range(length)] for length in lengths]
    return runner.batch(new, blocks, cached=cached, **more)
