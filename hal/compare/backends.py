"""Two backends on the same tokens: every operation's results, one call at a time, and the whole runs beside that."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import cast

import attrs
from torch import Tensor

from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.loading import load_model
from hal.compare.compare_errors import CompareError
from hal.compare.comparison_results import OUTSIDE, Comparison, Outcome, Row
from hal.compare.local import OurCalls, Side, TheirCalls
from hal.compare.saved import check_folder, save
from hal.compare.states import LOGITS, Drifts
from hal.compare.texts import Prompts, Texts, new_runner
from hal.compare.watch import Watch, disturbing
from hal.config import CompilationConfig, DTypeName
from hal.drivers.backend import Backend
from hal.errors import ConfigError


def compare_backends(
    checkpoint: str | Path | Checkpoint,
    first: Backend,
    second: Backend,
    prompts: Prompts,
    *,
    save_to: Path | None = None,
) -> Comparison:
    """Run the prompts on both, eagerly, and compare. ``first`` is the reference, and active afterwards.

    Args:
        checkpoint: that both load.
        first: opened; its config's dtype is the second's too.
        second: opened likewise, another object.
        prompts: all run together, in one prefill and decode steps of all.
        save_to: the folder for the first call that is out of tolerance, which is made only then.

    Raises:
        ConfigError: the backends have no dtype or block size in common, or were opened in different dtypes.
        CompareError: a kernel raises, or the model calls other operations on one of them.
        NumericsError: the reference gives NaN.
    """
    if save_to is not None:
        check_folder(save_to)
    if first is second:
        raise CompareError("a backend was given to be compared with itself", "open it twice, or compare its modes")
    sides = _sides(checkpoint, first, second, prompts)
    ours, theirs = sides
    dtype = ours.runner.spec.dtype
    watched, other = Watch(ours.model), Watch(theirs.model)
    comparing, recording = OurCalls(ours, theirs, keep=save_to is not None), TheirCalls(theirs)
    disturbance, beside = disturbing(dtype), new_runner(ours.model, first)
    texts, drifts = Texts(prompts, ours.runner.spec.block_size, ours.model.max_length), Drifts()
    while running := texts.running:
        recording.calls.clear()
        comparing.theirs = recording.calls
        second.activate()
        try:
            with other.step(texts.step, recording):
                found = texts.run(theirs.runner)
        except CompareError as raised:
            first.activate()
            with watched.step(texts.step, comparing), suppress(CompareError):  # at the call that was never made
                texts.run(ours.runner)
            raise _with_what_came_before(raised, comparing) from raised
        first.activate()
        with watched.step(texts.step, comparing):
            expected = texts.run(ours.runner)
        undisturbed = _states(watched, expected)
        with watched.step(texts.step, disturbance):
            disturbed = _states(watched, texts.run(beside))
        texts.take(drifts.step(undisturbed, _states(other, found), (undisturbed, disturbed), running))
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
    """A cache block size that both take, of those that the first prefers if it may be: slots are the same then.

    Raises:
        ConfigError: there is none.
    """
    asked = [each.config.cache.block_size for each in (first, second) if each.config.cache.block_size]
    wanted = [*asked, *first.limits.block_sizes, *second.limits.block_sizes, first.block_size]
    for size in wanted:
        if all(not each.limits.block_sizes or size in each.limits.block_sizes for each in (first, second)):
            return size
    raise ConfigError(
        f"the backends {first.name} and {second.name} have no cache block size in common: "
        + " and ".join(", ".join(map(str, each.limits.block_sizes)) for each in (first, second)),
        "compare each with one that takes any, such as cpu",
    )


def common_dtype(checkpoint: Checkpoint, first: Backend, second: Backend) -> DTypeName:
    """The dtype that both are to compute in: their config's, or else the checkpoint's.

    Raises:
        ConfigError: one of them does not compute in it, or their configs differ.
    """
    asked, other = first.config.dtype, second.config.dtype
    if asked != other:
        raise ConfigError(
            f"{first.name} was opened for dtype {asked}, and {second.name} for {other}", "open both for one dtype"
        )
    name = cast("DTypeName", str(checkpoint.dtype).removeprefix("torch.")) if asked == "auto" else asked
    names = [[str(dtype).removeprefix("torch.") for dtype in each.limits.dtypes] for each in (first, second)]
    for backend, known in zip((first, second), names, strict=True):
        if name not in known:
            common = [each for each in names[0] if each in names[1]]
            raise ConfigError(
                f"the backend {backend.name} does not compute in {name}"
                + (", the checkpoint's own dtype" if asked == "auto" else ""),
                f"set dtype to one that both have: {', '.join(common)}" if common else "they have no dtype in common",
            )
    return name


def configure(
    backend: Backend, prompts: Prompts, block_size: int, compilation: CompilationConfig, dtype: DTypeName
) -> None:
    """Give a backend a cache of just the size that the prompts take, and a way to run."""
    config = backend.config
    num_tokens = len(prompts.token_ids) * prompts.blocks_each(block_size) * block_size
    cache = attrs.evolve(config.cache, block_size=block_size, num_tokens=num_tokens, reuse_prefixes=False)
    backend.configure(attrs.evolve(config, cache=cache, compilation=compilation, dtype=dtype))


def _sides(checkpoint: str | Path | Checkpoint, first: Backend, second: Backend, prompts: Prompts) -> tuple[Side, Side]:
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.open(checkpoint)
    dtype, block_size = common_dtype(opened, first, second), common_block_size(first, second)
    made = []
    for backend in (first, second):
        configure(backend, prompts, block_size, CompilationConfig(), dtype)
        backend.activate()
        model = load_model(opened, backend)
        made.append(Side(backend, model, new_runner(model, backend)))
    first.activate()
    return made[0], made[1]


def _with_what_came_before(raised: CompareError, comparing: OurCalls) -> CompareError:
    """A kernel may raise because an earlier one gave it something wrong."""
    if (broken := comparing.broken) is None:
        return raised
    wrong = broken.error.problem or f"{broken.error.ratio:.3g} times what is allowed"
    return CompareError(
        f"{raised.problem}; before that, {broken.call.operation} in {broken.call.path}, step {broken.call.step}, "
        f"left its tolerance: {wrong}",
        f"repair {broken.call.operation} first",
    )


def _states(watch: Watch, logits: Tensor) -> dict[str, Tensor]:
    return {**watch.layers, LOGITS: logits}


def _rows(outcomes: list[Outcome], drifts: Drifts) -> tuple[Row, ...]:
    """Of all numbered layers, and of what is outside them."""
    by_layer: dict[str, list[Outcome]] = {layer: [] for layer in drifts.layers if layer != LOGITS}
    for outcome in outcomes:
        by_layer.setdefault(outcome.call.layer, []).append(outcome)
    outside = by_layer.pop(OUTSIDE, [])
    rows = [_row(layer, some, drifts, layer) for layer, some in by_layer.items()]
    return (*rows, _row(OUTSIDE, outside, drifts, LOGITS))


def _row(layer: str, outcomes: list[Outcome], drifts: Drifts, state: str) -> Row:
    worst = max(outcomes, key=lambda each: each.error.ratio, default=None)
    return Row(layer, len(outcomes), worst, drifts.largest(state), drifts.rounding(state))
