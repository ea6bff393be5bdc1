"""Comparison of the compile modes of one backend.

A compiled step calls no operations that could be compared one by one, but every mode writes the KV cache: each layer's
keys and values, in any layout. The first layer whose keys and values differ received wrong input, or computes them
wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import attrs
import torch
from torch import Tensor

from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.loading import load_model
from hal.compare.compare_backends import configure
from hal.compare.comparison_results import CompareError, Comparison, Row
from hal.compare.drifts import LOGITS, Drifts
from hal.compare.texts import Prompts, Texts, new_runner
from hal.compare.watch import ModelWatch, disturbing
from hal.config import CompilationConfig
from hal.drivers.backend import Backend
from hal.execution.runner import Runner
from hal.progress import Say, going_on, silent, since_start
from hal.step.fields import DUMMY_BLOCK

EAGER = "eager"


def compare_modes(
    checkpoint: str | Path | Checkpoint,
    backend: Backend,
    compilers: Sequence[str],
    prompts: Prompts,
    *,
    say: Say = silent,
) -> tuple[Comparison, ...]:
    """Run the prompts in every mode, and compare each mode with the first.

    Args:
        checkpoint: loaded once, so that all modes share the weights.
        backend: opened and active. The ``compilation`` of its config applies to all modes, except for the compiler.
        compilers: modes; the first is the reference.
        prompts: prompts, run together: one prefill, then decode steps.
        say: called with progress messages, also from another thread.

    Returns:
        One comparison per mode after the first.

    Raises:
        CompareError: fewer than two modes, or a mode twice.
        ConfigError: the backend does not have a mode.
        CaptureError: a graph cannot be captured.
        CompileError: the model cannot be compiled.
        NumericsError: the reference's logits contain NaN.
    """
    if len(set(compilers)) < 2 or len(set(compilers)) < len(compilers):
        raise CompareError(
            f"the modes to compare are {', '.join(compilers) or 'none'}", "name at least two modes, each once"
        )
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.open(checkpoint)
    base = backend.config.compilation
    sequences = len(prompts.token_ids)
    modes = {name: in_mode(base, name) for name in compilers}
    for compilation in modes.values():  # refuse invalid modes before loading weights
        configure(backend, prompts, backend.block_size, compilation, backend.config.dtype)
    say = since_start(say)
    with going_on(say, f"loading the model into {backend.name}") as done:
        model = load_model(opened, backend, progress=done)
    with ExitStack() as stack:

        def runner(compilation: CompilationConfig) -> Runner:
            configure(backend, prompts, backend.block_size, compilation, backend.config.dtype)
            return stack.enter_context(new_runner(model, backend, max_sequences=sequences))

        runners = {}
        for name in dict.fromkeys((EAGER, *modes)):
            with going_on(say, f"preparing {name}"):
                runners[name] = runner(modes.get(name, CompilationConfig()))
        return _compared(runners, runner(CompilationConfig()), compilers, prompts, say)


def _compared(
    runners: Mapping[str, Runner], beside: Runner, compilers: Sequence[str], prompts: Prompts, say: Say
) -> tuple[Comparison, ...]:
    """Each mode after the first, compared with that; ``beside`` runs eagerly, disturbed."""
    watch, disturbance = ModelWatch(beside.model), disturbing(beside.spec.dtype)
    reference, *others = compilers
    drifts = {name: Drifts() for name in others}
    texts = Texts(prompts, beside.spec.block_size, beside.model.max_length)
    with going_on(say, f"comparing {', '.join(others)} with {reference}") as done:
        while running := texts.running:
            states = {name: _state(texts, runner) for name, runner in runners.items()}
            with watch.step(texts.step, disturbance):
                disturbed = _state(texts, beside)
            for name in others:
                tokens = drifts[name].step(states[reference], states[name], (states[EAGER], disturbed), running)
            texts.take(tokens)
            done(texts.step, prompts.max_new_tokens)
    return tuple(_comparison(reference, name, found, texts) for name, found in drifts.items())


def in_mode(config: CompilationConfig, compiler: str) -> CompilationConfig:
    """Return the configuration with another compiler, also for decode steps."""
    return attrs.evolve(config, compiler=compiler, decode=attrs.evolve(config.decode, compiler=None))


def _state(texts: Texts, runner: Runner) -> dict[str, Tensor]:
    logits = texts.run(runner)
    with runner.backend.translating_errors(), torch.inference_mode():
        written = {
            f"layer {index} (states)": torch.cat(
                [each[DUMMY_BLOCK + 1 :].float().cpu().flatten() for each in layer.values()]
            )
            for index, layer in enumerate(runner.states.layers)
            if layer
        }
    return {**written, LOGITS: logits}


def _comparison(reference: str, name: str, drifts: Drifts, texts: Texts) -> Comparison:
    return Comparison(
        first=reference,
        second=name,
        steps=texts.step,
        tokens=texts.chosen,
        rows=tuple(Row(layer, 0, None, drifts.largest(layer), drifts.rounding(layer)) for layer in drifts.layers),
        broken=None,
        departure=drifts.departure(),
        choices=drifts.choices(),
        not_compared=(),
    )
