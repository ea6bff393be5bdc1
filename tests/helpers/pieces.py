"""What the tests of steps in pieces share, on every device: runners, batches, and the step to compare with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

import hal
from hal.execution.capture.captured_form import CapturedForm
from hal.execution.context import Phase
from hal.execution.pieces.piecewise import PiecewiseForm
from hal.nn import Batch, CausalLM


def form_of(runner: hal.Runner, phase: Phase) -> PiecewiseForm:
    """What runs a phase, which is in pieces."""
    form = runner.forms[phase]
    assert isinstance(form, PiecewiseForm)
    return form


def tokens_of(runner: hal.Runner, phase: Phase) -> list[int]:
    """The numbers of tokens that a phase was captured for, ascending."""
    form = runner.forms[phase]
    assert isinstance(form, CapturedForm)
    return [shape.tokens for shape in form.shapes]


def graphs_of(runner: hal.Runner, phase: Phase) -> int:
    """The number of pieces that each step of a phase is captured in."""
    form = runner.forms[phase]
    assert isinstance(form, CapturedForm)
    return form.num_graphs


def uncaptured(model: CausalLM, backend: hal.Backend) -> hal.Runner:
    """A runner with nothing captured, on a backend whose config stays as it is."""
    return configured(model, backend, hal.CompilationConfig())


def marked(model: CausalLM, backend: hal.Backend) -> hal.Runner:
    """A runner whose steps are split by markers, without a compiler."""
    config = backend.config.compilation
    return configured(model, backend, attrs.evolve(config, compiler="piecewise_eager", passes={}))


def configured(model: CausalLM, backend: hal.Backend, compilation: hal.CompilationConfig) -> hal.Runner:
    """A runner of another configuration than the backend's, which stays as it is."""
    config = backend.config
    backend.configure(attrs.evolve(config, compilation=compilation))
    try:
        return hal.Runner(model, backend)
    finally:
        backend.configure(config)


@torch.inference_mode()
def eagerly(runner: hal.Runner, batch: Batch) -> Tensor:
    """The model's own Python, on the same cache."""
    return runner.model(batch, runner.states.layers)


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
