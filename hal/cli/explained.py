"""What becomes of a model's decode step in each way of running it, for ``hal explain``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from hal.cli.console import print_table

if TYPE_CHECKING:
    from hal.backend import Backend
    from hal.compile.optimise import OptimisedStep, Stage
    from hal.compile.split import SplitStep
    from hal.config import CompilationConfig
    from hal.kv_cache import KVCacheSpec
    from hal.nn import CausalLM

MOST_REASONS = 3
"""Of a rewrite's near misses, the commonest are shown."""
UNTRACED = "the model's own Python is"
NO_REWRITES = "no rewrite is applied"


def explain_step(model: CausalLM, on: Backend, size: int) -> tuple[Sequence[Stage], SplitStep | None]:
    """Print what the backend's compiler of decode steps does to one of ``size`` sequences.

    Returns:
        The graphs that there are on the way, if any; and the pieces of the last, if it is captured in pieces.

    Raises:
        HalError: what a runner would raise, or warn of where ``on_capture_error`` is ``eager``.
    """
    config = on.config.compilation.of("decode")
    if captures_python(config, size):
        limit = config.torch_compile_max_bs
        click.echo(f"{UNTRACED} captured as it is, since torch_compile_max_bs is {limit}; {NO_REWRITES}")
    elif config.compiler == "eager":
        click.echo(f"{UNTRACED} run as it is; {NO_REWRITES}")
    elif config.compiler == "piecewise_eager":
        _at_markers(model, on, size)
    elif config.compiler == "inductor":
        return _for_inductor(model, on, size), None
    else:
        return _rewritten(model, on, size)
    return (), None


def captures_python(config: CompilationConfig, size: int) -> bool:
    """Whether the compiler ``graph`` captures decode steps of ``size`` from the model's own Python."""
    limit = config.torch_compile_max_bs
    return config.compiler == "graph" and limit is not None and size > limit


def _at_markers(model: CausalLM, on: Backend, size: int) -> None:
    from hal.runtime.markers import MarkedStep

    at = sorted(on.splitting_ops(on.config.compilation.of("decode")))
    with _capturing_only(on, size), on.explaining():
        pieces = MarkedStep(model, on, on.kv_cache(_cache_spec(model, on, size + 1)), "decode").num_pieces
    click.echo(f"{UNTRACED} captured in pieces, {pieces} of them; the {pieces - 1} calls between them run eagerly, of "
               f"{', '.join(at)}; {NO_REWRITES}")  # fmt: skip


def _for_inductor(model: CausalLM, on: Backend, size: int) -> Sequence[Stage]:
    """The step as Inductor gets it."""
    from hal.compile.optimise import stage_of
    from hal.compile.trace import example_batch, trace_step

    began = time.perf_counter()
    example = example_batch(size, size, size, columns=2 * size + 3, device=on.device.torch)
    kept = sorted(on.inductor or ())
    cache = on.kv_cache(_cache_spec(model, on, 2))
    traced = stage_of("trace", trace_step(model, example, cache.layers, whole=kept, any_size=size > 1), began)
    _print_stages((traced,))
    click.echo(f"\nInductor compiles what is traced; {NO_REWRITES}; the driver's kernels run for "
               f"{', '.join(kept) or 'nothing'}")  # fmt: skip
    return (traced,)


def _rewritten(model: CausalLM, on: Backend, size: int) -> tuple[Sequence[Stage], SplitStep | None]:
    """Rewritten, and then split, lowered, or handed to a compiler of the driver's own."""
    from hal.compilers import OWN_COMPILERS

    compiler = on.config.compilation.of("decode").compiler
    split, after = None, None
    if compiler == "piecewise":
        step, split = _in_pieces(model, on, size)
    else:
        step, seconds = _lowered(model, on, size)
        after = "lower", "", f"{seconds:.3f}"
    later = () if compiler in OWN_COMPILERS else _of_the_driver(model, on, size)
    if compiler not in OWN_COMPILERS and not later:
        click.echo(
            f"the driver's own {compiler} does not show what it runs; if it takes hal's rewrites, it gets this\n"
        )
    _print_stages(step.stages, after, later)
    click.echo()
    print_table(("rewrite", "applied", "not applied", "ms", "why not"), _rewrites(step, on))
    if split is not None:
        pieces = [each for each in split.segments if each.captured]
        between = [each for each in split.segments if not each.captured]
        names = sorted({name for each in between for name in each.operations})
        click.echo(f"\n{len(pieces)} pieces are captured; {len(between)} parts between them run eagerly, at "
                   f"{', '.join(names)} and where lengths or rows of logits are read")  # fmt: skip
    return (*step.stages, *later), split


def _lowered(model: CausalLM, on: Backend, size: int) -> tuple[OptimisedStep, float]:
    """The rewritten step, and the seconds that came after the rewrites."""
    from hal.runtime.optimised import OptimisedModel

    began = time.perf_counter()
    cache, config = on.kv_cache(_cache_spec(model, on, 2)), on.config.compilation.of("decode")
    decoder = OptimisedModel(model, on, cache, config)
    decoder.prepare(size)
    step = decoder.optimised[size]
    return step, time.perf_counter() - began - sum(each.seconds for each in step.stages)


def _in_pieces(model: CausalLM, on: Backend, size: int) -> tuple[OptimisedStep, SplitStep]:
    from hal.runtime.pieces import PiecewiseStep

    with _capturing_only(on, size), on.explaining():
        pieces = PiecewiseStep(model, on, on.kv_cache(_cache_spec(model, on, size + 1)), "decode")
    assert pieces.optimised is not None  # else it has raised
    assert pieces.split is not None
    return pieces.optimised, pieces.split


def _of_the_driver(model: CausalLM, on: Backend, size: int) -> Sequence[Stage]:
    """What a compiler of the driver's own did behind the rewrites, as far as it says so."""
    compiler = on.config.compilation.of("decode").compiler
    with _capturing_only(on, size), on.explaining():
        decoder = on.decoder(compiler, model, on.kv_cache(_cache_spec(model, on, size + 1)))
        stages: Sequence[Stage] = decoder.stages(size) if hasattr(decoder, "stages") else ()
    return stages


@contextmanager
def _capturing_only(on: Backend, size: int) -> Iterator[None]:
    """Inside, the configuration says that one batch size is captured, and what goes wrong is raised."""
    import attrs

    config = on.config
    decode = attrs.evolve(config.compilation.decode, capture_sizes=None, max_capture_size=None)
    alone = attrs.evolve(
        config.compilation, capture_sizes=(size,), max_capture_size=None, decode=decode, on_capture_error="raise"
    )
    on.configure(attrs.evolve(config, compilation=alone))
    try:
        yield
    finally:
        on.configure(config)


def _cache_spec(model: CausalLM, on: Backend, num_blocks: int) -> KVCacheSpec:
    from hal.kv_cache import KVCacheSpec

    return KVCacheSpec(
        num_layers=model.num_layers, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim,
        dtype=next(model.parameters()).dtype, num_blocks=num_blocks, block_size=on.block_size,
    )  # fmt: skip


def _print_stages(
    stages: Sequence[Stage], after: tuple[str, str, str] | None = None, later: Sequence[Stage] = ()
) -> None:
    rows = [(stage.name, str(stage.nodes), f"{stage.seconds:.3f}") for stage in (*stages, *later)]
    if after is not None:
        rows.insert(len(stages), after)
    print_table(("stage", "calls", "seconds"), rows)


def _rewrites(step: OptimisedStep, on: Backend) -> list[tuple[str, ...]]:
    """A row for each pass. A function looks for no structure, and may not say how often it changed something."""
    from hal.compile.optimise import all_passes
    from hal.compile.rewrite import Rewrite

    rewrites = {each.name for each in all_passes(on) if isinstance(each, Rewrite)}
    rows: list[tuple[str, ...]] = []
    for each in step.report.passes:
        counts = "" if each.changes is None else str(each.changes), ""
        if each.name in rewrites:
            counts = str(len(each.matches)), str(len(each.near_misses))
        reasons = [f"{times} x {reason}" for reason, times in each.reasons.most_common(MOST_REASONS)]
        rows.append((each.name, *counts, f"{each.seconds * 1e3:.1f}", "; ".join(reasons)))
    return rows
