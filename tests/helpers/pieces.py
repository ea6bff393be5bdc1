"""Runners, batches and reference steps for tests of piecewise steps on every device."""

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
from hal.nn import CausalLM
from hal.nn.model import flat_outputs
from hal.step import LAST, Batch, Rows
from hal.step.rows import taken


def form_of(runner: hal.Runner, phase: Phase) -> PiecewiseForm:
    """Return the form of a phase, which must be piecewise."""
    form = runner.forms[phase]
    assert isinstance(form, PiecewiseForm)
    return form


def tokens_of(runner: hal.Runner, phase: Phase) -> list[int]:
    """Return the numbers of tokens for which a phase was captured, ascending."""
    form = runner.forms[phase]
    assert isinstance(form, CapturedForm)
    return [shape.tokens for shape in form.shapes]


def graphs_of(runner: hal.Runner, phase: Phase) -> int:
    """Return the number of graphs in which each step of a phase is captured."""
    form = runner.forms[phase]
    assert isinstance(form, CapturedForm)
    return form.num_graphs


def uncaptured(model: CausalLM, backend: hal.Backend) -> hal.Runner:
    """Return a runner without captures. The backend's config does not change."""
    return configured(model, backend, hal.CompilationConfig())


def marked(model: CausalLM, backend: hal.Backend) -> hal.Runner:
    """Return a runner whose steps are split without a compiler (piecewise_eager)."""
    config = backend.config.compilation
    return configured(model, backend, attrs.evolve(config, compiler="piecewise_eager", passes={}))


def configured(model: CausalLM, backend: hal.Backend, compilation: hal.CompilationConfig) -> hal.Runner:
    """Return a runner with another compilation config. The backend's config does not change."""
    config = backend.config
    backend.configure(attrs.evolve(config, compilation=compilation))
    try:
        return hal.Runner(model, backend)
    finally:
        backend.configure(config)


@torch.inference_mode()
def eagerly(runner: hal.Runner, batch: Batch, rows: Rows = LAST) -> Tensor:
    """Return the logits of the model's own Python code on the same cache."""
    hidden, *_ = flat_outputs(runner.model, runner.model(batch, runner.states.layers))
    return runner.model.logits(taken(hidden, rows, batch, batch.shape))


def drawn(runner: hal.Runner, seed: int, lengths: Sequence[int], cached: Sequence[int], **more: Any) -> Batch:
    """Draw a batch of new tokens after cached ones, in random blocks. The cached tokens are computed eagerly."""
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
