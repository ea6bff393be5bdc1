"""``hal explain``: what compiling makes of a model's step, stage by stage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hal.cli.console import print_table
from hal.cli.emulation import EMULATE, emulated
from hal.cli.settings import COMPILATION_CONFIG, COMPILER, settings_of
from hal.errors import ConfigError

if TYPE_CHECKING:
    from hal.backend import Backend
    from hal.compile.optimise import OptimisedStep, Stage
    from hal.compile.split import SplitStep
    from hal.kv_cache import KVCacheSpec
    from hal.nn import CausalLM
    from hal.runtime.checkpoint import Checkpoint

MOST_REASONS = 3
"""Of a rewrite's near misses, the commonest are shown."""


@click.command(short_help="Show what compiling makes of a decode step.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--backend", metavar="NAME", help="A driver, or auto; see `hal backends`.")
@click.option("--emulate", is_flag=True, help=EMULATE)
@click.option("--dtype", metavar="NAME", help="auto (the checkpoint's own), float32, bfloat16 or float16.")
@click.option("--compiler", metavar="NAME", help=COMPILER)
@click.option("--compilation-config", metavar="JSON", help=COMPILATION_CONFIG)
@click.option("--batch-size", type=click.IntRange(min=1), default=2, show_default=True, help="Of the decode step.")
@click.option(
    "--dump", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Write each stage's graph."
)
def command(
    checkpoint: Path,
    backend: str | None,
    emulate: bool,
    dtype: str | None,
    compiler: str | None,
    compilation_config: str | None,
    batch_size: int,
    dump: Path | None,
) -> None:
    """Compile a decode step of the model in the folder CHECKPOINT, and say what was done to it.

    Prints each stage's calls and seconds; how often each rewrite was applied, at most how often it could have been, and
    why it was not; where the step was split; and, on devices that count them, what a layer launches before and after.
    """
    import hal
    from hal.config import read
    from hal.runtime.checkpoint import Checkpoint

    settings = settings_of(backend, dtype, compiler, compilation_config)
    read(hal.Config, settings, "configuration")
    opened = Checkpoint.open(checkpoint)
    with emulated(emulate, backend) as options:
        settings["options"] = {**settings.get("options", {}), **options}
        on = hal.open(read(hal.Config, settings, "configuration"))
    model = hal.load_model(opened, on)
    step, split, seconds = _compiled(model, on, batch_size)
    later = _of_the_driver(model, on, batch_size)
    click.echo(f"{opened.architecture}, {model.num_layers} layers, on {on.name}: a decode step of {batch_size}, "
               f"{on.config.compilation.of('decode').compiler}\n")  # fmt: skip
    rows = [(stage.name, str(stage.nodes), f"{stage.seconds:.3f}") for stage in step.stages]
    rows.append(("split" if split else "lower", "", f"{seconds:.3f}"))
    rows += [(stage.name, str(stage.nodes), f"{stage.seconds:.3f}") for stage in later]
    print_table(("stage", "calls", "seconds"), rows)
    click.echo()
    print_table(("rewrite", "applied", "at most", "ms", "why not elsewhere"), _rewrites(step))
    if split is not None:
        pieces = [each for each in split.segments if each.captured]
        between = [each for each in split.segments if not each.captured]
        names = sorted({name for each in between for name in each.operations})
        click.echo(f"\n{len(pieces)} pieces are captured; {len(between)} parts between them run eagerly, at "
                   f"{', '.join(names)} and where lengths or rows of logits are read")  # fmt: skip
    _launches(opened, checkpoint, on, batch_size, options)
    if dump is not None:
        _dump(dump, (*step.stages, *later), split)
        click.echo(f"\nthe graphs are in {dump}")


def _of_the_driver(model: CausalLM, on: Backend, size: int) -> Sequence[Stage]:
    """What a compiler of the driver's own did behind the rewrites, as far as it says so."""
    import attrs

    from hal.compilers import OWN_COMPILERS

    compilation = on.config.compilation
    compiler = compilation.of("decode").compiler
    if compiler in OWN_COMPILERS:
        return ()
    alone = attrs.evolve(
        compilation, capture_sizes=(size,), decode=attrs.evolve(compilation.decode, capture_sizes=None)
    )
    on.configure(attrs.evolve(on.config, compilation=alone))
    stages: Sequence[Stage]
    with on.explaining():
        decoder = on.decoder(compiler, model, on.kv_cache(_cache_spec(model, on, size + 1)))
        stages = decoder.stages(size) if hasattr(decoder, "stages") else ()
    on.configure(attrs.evolve(on.config, compilation=compilation))
    if not stages:
        click.echo(f"the driver's own {compiler} does not show what it does behind the rewrites\n")
    return stages


def _cache_spec(model: CausalLM, on: Backend, num_blocks: int) -> KVCacheSpec:
    from hal.kv_cache import KVCacheSpec

    return KVCacheSpec(
        num_layers=model.num_layers, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim,
        dtype=next(model.parameters()).dtype, num_blocks=num_blocks, block_size=on.block_size,
    )  # fmt: skip


def _compiled(model: CausalLM, on: Backend, size: int) -> tuple[OptimisedStep, SplitStep | None, float]:
    """The rewritten step; its pieces, if the compiler makes some; and the seconds that came after the rewrites."""
    import attrs

    from hal.batch import Batch
    from hal.compile.optimise import optimise_model
    from hal.compile.split import split
    from hal.compile.trace import example_batch

    config = on.config.compilation.of("decode")
    cache = on.kv_cache(_cache_spec(model, on, 2))
    piecewise = config.compiler == "piecewise"
    sizes = (11, 3, 5) if piecewise else (size, size, size)
    example = example_batch(*sizes, columns=2 * size + 3 if not piecewise else 7, device=on.device.torch)
    step = optimise_model(model, example, cache.layers, on, config.passes, any_size=piecewise or size > 1)
    began, fields = time.perf_counter(), [each.name for each in attrs.fields(Batch)]
    if piecewise:
        at = on.splitting_ops(config)
        by_token = ("token_ids", "positions", "slot_mapping")
        step.hoist(on, at)
        parts = split(step.traced.graph.graph, fields, step.traced.fixed, at=at, by_token=by_token)
        return step, parts, time.perf_counter() - began
    step.hoist(on)
    step.lowered()
    return step, None, time.perf_counter() - began


def _rewrites(step: OptimisedStep) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for each in step.report.passes:
        count = len(each.matches) if each.changes is None else each.changes
        reasons = [f"{times} x {reason}" for reason, times in each.reasons.most_common(MOST_REASONS)]
        limit = step.at_most.get(each.name)
        rows.append((each.name, str(count), "" if limit is None else str(limit), f"{each.seconds * 1e3:.1f}",
                     "; ".join(reasons)))  # fmt: skip
    return rows


def _launches(opened: Checkpoint, path: Path, on: Backend, size: int, options: dict[str, Any]) -> None:
    """What a layer launches by the model's Python and compiled, on a backend that counts it."""
    from hal.bench.launches import count
    from hal.bench.plan import Plan, settle

    compiler = on.config.compilation.of("decode").compiler
    try:
        with on.counting_launches():
            pass
    except ConfigError:
        return
    modes = ("eager",) if compiler == "eager" else ("eager", compiler)
    config = on.config.compilation
    kept = {"passes": dict(config.of("decode").passes), "splitting_ops": config.of("decode").splitting_ops}
    plan = Plan(workload="decode", checkpoint=str(path), backend=on.name, dtype=None if on.config.dtype == "auto" else
                on.config.dtype, batch_sizes=(size,), length=20, compilers=modes, trace=True,
                options={**on.config.options, **options}, compilation=kept)  # fmt: skip
    found = count(settle(plan), say=lambda text: None)
    click.echo()
    print_table(
        ("launches", "per layer", "kernels of a layer"),
        [
            (each.contender, str(each.per_layer), ", ".join(f"{name} {times}" for name, times in each.layer.items()))
            for each in found
        ],
    )


def _dump(folder: Path, stages: Sequence[Stage], split: SplitStep | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, stage in enumerate(stages):
        (folder / f"{number}-{stage.name}.py").write_text(stage.code, encoding="utf-8")
    if split is None:
        return
    lines = []
    for number, each in enumerate(split.segments):
        kind = "captured" if each.captured else f"eager: {', '.join(each.operations) or 'rows of logits'}"
        outputs = ", ".join(output.name for output in each.outputs)
        lines.append(f"{number} {kind}\n  reads {', '.join(each.inputs)}\n  gives {outputs or 'nothing'}\n")
    (folder / f"{len(stages)}-split.txt").write_text("".join(lines), encoding="utf-8")
