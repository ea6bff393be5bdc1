"""Comparison of two backends on the same tokens: operation by operation, and as whole runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

import attrs
from torch import Tensor

from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.loading import load_model
from hal.compare.call_comparison import CallComparer, CallRecorder, Side
from hal.compare.comparison_results import OUTSIDE, CompareError, Comparison, Outcome, Row
from hal.compare.drifts import LOGITS, Drifts
from hal.compare.saved_call import check_folder, save
from hal.compare.texts import Prompts, Texts, new_runner
from hal.compare.watch import ModelWatch, disturbing
from hal.config import CompilationConfig, DTypeName
from hal.drivers.backend import Backend
from hal.errors import ConfigError
from hal.execution.runner import Runner
from hal.generation.drafting.draft_checkpoints import ModelPlan
from hal.generation.drafting.draft_passes import pass_of_target
from hal.generation.drafting.drafter import DraftConfig, plan_drafter
from hal.nn import CausalLM, DraftLM
from hal.progress import Say, going_on, silent, since_start


def compare_backends(
    checkpoint: str | Path | Checkpoint,
    first: Backend,
    second: Backend,
    prompts: Prompts,
    *,
    draft: DraftConfig | None = None,
    save_to: Path | None = None,
    say: Say = silent,
) -> Comparison:
    """Run the prompts eagerly on both backends and compare. ``first`` is the reference, and active afterwards.

    Args:
        checkpoint: checkpoint that both load.
        first: opened backend; the dtype of its config also applies to the second.
        second: another opened backend.
        prompts: prompts, run together: one prefill, then decode steps.
        draft: compare the model that drafts for the checkpoint's, with the hidden states of that on ``first``; None to
            compare the checkpoint's.
        save_to: folder for the first call out of tolerance; created only if one exists.
        say: called with progress messages, also from another thread.

    Raises:
        ConfigError: the backends have no common dtype or block size, or were opened with different dtypes; or the
            drafter does not fit the model, or is none.
        CompareError: a kernel raises, or the model calls different operations on the two backends.
        NumericsError: the reference's logits contain NaN.
    """
    if save_to is not None:
        check_folder(save_to)
    if first is second:
        raise CompareError(
            "the two backends to compare are the same object", "open the driver twice, or compare its modes"
        )
    say = since_start(say)
    ours, theirs, hidden = _sides(checkpoint, first, second, prompts, draft, say)
    dtype = ours.runner.spec.dtype
    watched, other = ModelWatch(ours.model), ModelWatch(theirs.model)
    comparing, recording = CallComparer(ours, theirs, keep=save_to is not None), CallRecorder(theirs)
    disturbance, beside = disturbing(dtype), new_runner(ours.model, first)
    texts, drifts = Texts(prompts, ours.runner.spec.block_size, ours.model.max_length, hidden), Drifts()
    with going_on(say, f"comparing {second.name} with {first.name}") as done:
        while running := texts.running:
            recording.calls.clear()
            comparing.recorded = recording.calls
            second.activate()
            try:
                with other.step(texts.step, recording):
                    found = texts.run(theirs.runner)
            except CompareError as raised:
                first.activate()
                with watched.step(texts.step, comparing), suppress(CompareError):  # raised at the missing call
                    texts.run(ours.runner)
                raise _with_what_came_before(raised, comparing) from raised
            first.activate()
            with watched.step(texts.step, comparing):
                expected = texts.run(ours.runner)
            undisturbed = _states(watched, expected)
            with watched.step(texts.step, disturbance):
                disturbed = _states(watched, texts.run(beside))
            texts.take(drifts.step(undisturbed, _states(other, found), (undisturbed, disturbed), running))
            done(texts.step, prompts.max_new_tokens)
    if save_to is not None and comparing.evidence is not None:
        save(comparing.evidence, (first.name, second.name), dtype, save_to)
    return Comparison(
        first=first.name,
        second=second.name,
        steps=texts.step,
        tokens=texts.chosen,
        rows=_rows(comparing.outcomes, drifts),
        broken=comparing.broken,
        departure=drifts.departure(),
        choices=drifts.choices(),
        not_compared=tuple(comparing.not_compared.values()),
    )


def common_block_size(first: Backend, second: Backend) -> int:
    """Return a cache block size that both backends support; both then use the same slots.

    Raises:
        ConfigError: no block size is supported by both.
    """
    asked = [each.config.cache.block_size for each in (first, second) if each.config.cache.block_size]
    wanted = [*asked, *first.limits.block_sizes, *second.limits.block_sizes, first.block_size]
    for size in wanted:
        if all(not each.limits.block_sizes or size in each.limits.block_sizes for each in (first, second)):
            return size
    raise ConfigError(
        f"the backends {first.name} and {second.name} have no common cache block size: "
        + " and ".join(", ".join(map(str, each.limits.block_sizes)) for each in (first, second)),
        "compare each with a backend that supports any block size, such as cpu",
    )


def common_dtype(checkpoint: Checkpoint, first: Backend, second: Backend) -> DTypeName:
    """Return the dtype of the comparison: the one in the backends' configs, or the checkpoint's.

    Raises:
        ConfigError: a backend does not support it, or the configs differ.
    """
    asked, other = first.config.dtype, second.config.dtype
    if asked != other:
        raise ConfigError(
            f"{first.name} was opened for dtype {asked}, and {second.name} for {other}", "open both with the same dtype"
        )
    name = cast("DTypeName", str(checkpoint.dtype).removeprefix("torch.")) if asked == "auto" else asked
    names = [[str(dtype).removeprefix("torch.") for dtype in each.limits.dtypes] for each in (first, second)]
    for backend, known in zip((first, second), names, strict=True):
        if name not in known:
            common = [each for each in names[0] if each in names[1]]
            raise ConfigError(
                f"the backend {backend.name} does not compute in {name}"
                + (", the checkpoint's dtype" if asked == "auto" else ""),
                f"set dtype to one that both support: {', '.join(common)}" if common else "they have no common dtype",
            )
    return name


def configure(
    backend: Backend, prompts: Prompts, block_size: int, compilation: CompilationConfig, dtype: DTypeName
) -> None:
    """Configure a backend with a compilation, and a cache of exactly the size that the prompts need."""
    config = backend.config
    num_tokens = len(prompts.token_ids) * prompts.blocks_each(block_size) * block_size
    cache = attrs.evolve(config.cache, block_size=block_size, num_tokens=num_tokens, reuse_prefixes=False)
    backend.configure(attrs.evolve(config, cache=cache, compilation=compilation, dtype=dtype))


def _sides(
    checkpoint: str | Path | Checkpoint,
    first: Backend,
    second: Backend,
    prompts: Prompts,
    draft: DraftConfig | None,
    say: Say,
) -> tuple[Side, Side, Sequence[Tensor]]:
    """Return both sides, and the hidden states that a drafting model reads for each prompt, if it reads any."""
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.open(checkpoint)
    dtype, block_size = common_dtype(opened, first, second), common_block_size(first, second)
    made, hidden = [], list[Tensor]()
    for backend in (first, second):
        configure(backend, prompts, block_size, CompilationConfig(), dtype)
        backend.activate()
        with going_on(say, f"loading the model into {backend.name}") as done:
            model = load_model(opened, backend, progress=done)
            if draft is not None:
                target, model = model, _drafting(draft, opened, model, backend)
        if draft is not None and isinstance(model, DraftLM) and backend is first:
            if min(map(len, prompts.token_ids)) < 2:
                raise CompareError("a prompt has one token, behind which no head drafts", "give longer prompts")
            with Runner(target, backend, max_sequences=1) as runner, runner.running():
                hidden = [pass_of_target(runner, list(each)).read(model)[:-1] for each in prompts.token_ids]
        made.append(Side(backend, model, new_runner(model, backend)))
    first.activate()
    return made[0], made[1], hidden


def _drafting(draft: DraftConfig, checkpoint: Checkpoint, target: CausalLM, backend: Backend) -> CausalLM:
    plan = plan_drafter(draft, checkpoint, backend)
    if not isinstance(plan, ModelPlan):
        raise ConfigError(
            f"the drafter {draft.method} runs no model that could be compared", "name a checkpoint, or mtp, in --draft"
        )
    plan.load(target, backend, None)
    assert plan.model is not None
    return plan.model


def _with_what_came_before(raised: CompareError, comparing: CallComparer) -> CompareError:
    """Add the first call out of tolerance, which may have caused the exception."""
    if (broken := comparing.broken) is None:
        return raised
    wrong = broken.error.problem or f"{broken.error.ratio:.3g} times the allowed error"
    return CompareError(
        f"{raised.problem}; before that, {broken.call.operation} in {broken.call.path}, step {broken.call.step}, "
        f"was out of tolerance: {wrong}",
        f"fix {broken.call.operation} first",
    )


def _states(watch: ModelWatch, logits: Tensor) -> dict[str, Tensor]:
    return {**watch.layers, LOGITS: logits}


def _rows(outcomes: list[Outcome], drifts: Drifts) -> tuple[Row, ...]:
    """Return a row per numbered layer, and one for :data:`OUTSIDE`."""
    by_layer: dict[str, list[Outcome]] = {layer: [] for layer in drifts.layers if layer != LOGITS}
    for outcome in outcomes:
        by_layer.setdefault(outcome.call.layer, []).append(outcome)
    outside = by_layer.pop(OUTSIDE, [])
    rows = [_row(layer, some, drifts, layer) for layer, some in by_layer.items()]
    return (*rows, _row(OUTSIDE, outside, drifts, LOGITS))


def _row(layer: str, outcomes: list[Outcome], drifts: Drifts, state: str) -> Row:
    worst = max(outcomes, key=lambda each: each.error.ratio, default=None)
    return Row(layer, len(outcomes), worst, drifts.largest(state), drifts.rounding(state))
