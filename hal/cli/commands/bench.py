"""``hal bench``: time decode steps and prefills, against other implementations and hardware limits."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import attrs
import click
from click.core import ParameterSource

from hal.cli.config_options import Settings, configured, start_ranks, tensor_parallel
from hal.cli.console import SuggestingGroup, print_table, progress_on_stderr
from hal.cli.generation_options import PROMPTS_FILE, Prompts, draft_options
from hal.cli.stdout import ResultCommand, check_file, echo, writing

if TYPE_CHECKING:
    from hal.bench.plan import Workload
    from hal.generation.drafting.drafter import DraftConfig

log = logging.getLogger("hal.cli")

GRAPH = "graph"
"""The compiler of texts with drafts, if none is named."""
FILE = click.Path(path_type=Path)
HELP = {
    "shapes": "Use random weights with the shapes of a model, such as qwen3-0.6b, in place of a checkpoint.",
    "batch_sizes": "Number of sequences. Repeatable.",
    "compilers": "A compiler of the backend. Repeatable. Default: all for decode, eager for prefill.",
    "against": "transformers: eager and, for decode, compiled with a static cache. llama.cpp: the model's dtype, Q8_0 "
    "and Q4_0, or the GGUF file that hal reads. Repeatable.",
    "repeats": "Timed steps of each contender.",
    "threads": "Number of torch's CPU threads.",
    "tensor_parallel": "Split hal's model between N ranks, which are started if this process is none.",
    "trace": "Also count kernel launches per layer, on devices that support it.",
    "memory": "Also measure each contender's peak memory, in a separate process.",
    "figures_file": "Write all figures to this file, as JSON.",
}
OPTIONS = (
    click.argument("checkpoint", required=False, metavar="[CHECKPOINT]"),
    click.option("--shapes", metavar="NAME", help=HELP["shapes"]),
    click.option("--batch-size", "batch_sizes", type=int, multiple=True, default=(1,), help=HELP["batch_sizes"]),
    configured(compiler=HELP["compilers"], compilation_config=" For all compilers."),
    click.option("--against", multiple=True, metavar="NAME", help=HELP["against"]),
    click.option("--repeats", type=int, default=15, show_default=True, help=HELP["repeats"]),
    click.option("--threads", type=int, help=HELP["threads"]),
    tensor_parallel(HELP["tensor_parallel"]),
    click.option("--trace", is_flag=True, help=HELP["trace"]),
    click.option("--memory", is_flag=True, help=HELP["memory"]),
    click.option("--figures", "figures_file", type=FILE, metavar="FILE.json", help=HELP["figures_file"]),
)


def _options(command: Callable[..., None]) -> Callable[..., None]:
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(OPTIONS), command)


class _Workloads(SuggestingGroup):
    takers = ("decode", "prefill")


@click.group("bench", cls=_Workloads)
def command() -> None:
    """Measure decode steps or prefills, and plot the figures.

    Contenders run in turns, round after round, and are compared by the medians of their times. First the command checks
    that they compute the same logits.
    """


@command.command(cls=ResultCommand)
@_options
@click.option("--context", "length", type=int, default=512, show_default=True, help="Tokens in each sequence's cache.")
@draft_options
@click.option("--prompts-file", type=click.File("rb"), metavar="FILE", help=f"With --draft: {PROMPTS_FILE}")
def decode(draft: DraftConfig | None, prompts_file: BinaryIO | None, **options: Any) -> None:
    """Time one decode step of the model in the folder CHECKPOINT, or of --shapes.

    With --draft, time texts of 64 new tokens with and without drafts, by turns, and print the ratio, and the part of
    the drafted tokens that the model accepts, by place.
    """
    if draft is not None:
        context = click.get_current_context()
        if unread := [
            f"--{name.replace('_', '-')}"
            for name in ("shapes", "length", "against", "threads", "tensor_parallel", "trace", "memory")
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        ]:
            raise click.UsageError(f"{unread[0].replace('length', 'context')} cannot be used with --draft.")
        _bench_drafts(draft, prompts_file, **options)
        return
    if prompts_file is not None:
        raise click.UsageError("--prompts-file needs --draft.")
    _bench("decode", **options)


@command.command(cls=ResultCommand)
@_options
@click.option("--tokens", "length", type=int, default=512, show_default=True, help="Tokens per prompt.")
def prefill(**options: Any) -> None:
    """Time the prefill of whole prompts of the model in the folder CHECKPOINT, or of --shapes."""
    _bench("prefill", **options)


@command.command(cls=ResultCommand)
@click.argument("figures", type=FILE, nargs=-1, required=True, metavar="FIGURES.json...")
def plot(figures: Sequence[Path]) -> None:
    """Print a plot of figures, as SVG. Several files, of runs on one machine, have a common scale."""
    from hal.bench.plot import read_figures, times

    echo(times(*map(read_figures, figures)), nl=False)


def _warn_of_unread_compilation() -> None:
    from hal.drivers.registry import read_config

    given = read_config().get("compilation", {})
    if given:
        keys = ", ".join(f"compilation.{key}" for key in given)
        log.warning(
            "%s of the environment is not read, because the benchmark sets the compiler; use --compilation-config", keys
        )


def _bench_drafts(
    draft: DraftConfig,
    prompts_file: BinaryIO | None,
    *,
    checkpoint: str | None,
    batch_sizes: Sequence[int],
    compilers: Sequence[str],
    repeats: int,
    settings: Settings,
    figures_file: Path | None,
    **unread: Any,
) -> None:
    from hal.bench import draft_speed
    from hal.config.bounds import REPEATS, SEQUENCES, check_count

    if checkpoint is None:
        raise click.UsageError("--draft needs a CHECKPOINT.")
    check_count(repeats, REPEATS, "the number of repeats must be")
    for each in batch_sizes:
        check_count(each, SEQUENCES, "the batch size must be")
    if figures_file is not None:
        check_file(figures_file)
    prompts = draft_speed.PROMPTS if prompts_file is None else Prompts.read((), prompts_file).texts
    found = []
    with settings.emulated() as settings:
        for compiler in compilers or (GRAPH,):
            for size in dict.fromkeys(batch_sizes):
                speed = draft_speed.measure(
                    checkpoint,
                    draft,
                    settings.given,
                    batch_size=size,
                    compiler=compiler,
                    repeats=repeats,
                    prompts=prompts,
                    say=progress_on_stderr(),
                )
                found.append(speed)
    print_table(*draft_speed.table(found))
    if figures_file is not None:
        with writing(figures_file):
            figures_file.write_text(json.dumps([each.as_json() for each in found], indent=1) + "\n", encoding="utf-8")


def _bench(workload: Workload, figures_file: Path | None, settings: Settings, **options: Any) -> None:
    from hal.bench import bench_report
    from hal.bench.measurement import run
    from hal.bench.plan import Plan, checkpoint_of
    from hal.config import ParallelConfig
    from hal.parallel.launch import rank, yielding_to_the_cause

    plan = Plan(workload=workload, **settings.given, **options)
    _warn_of_unread_compilation()
    first = rank() == 0
    if figures_file is not None and first:
        check_file(figures_file)
    ranks = plan.tensor_parallel or 1
    if ranks > 1 and start_ranks(ParallelConfig(ranks), checkpoint_of(plan)):
        return
    with yielding_to_the_cause(), settings.emulated() as settings:
        plan = attrs.evolve(plan, **settings.given)
        result = run(plan, say=progress_on_stderr(shown=first))
    if not first:
        return
    echo(bench_report.heading(result) + "\n")
    print_table(*bench_report.table(result))
    echo("\n" + "\n".join(f"- {note}" for note in bench_report.notes(result)))
    if result.launches:
        echo("\nkernel launches of a step\n")
        print_table(*bench_report.launches_table(result))
        echo("\n" + "\n".join(f"- {note}" for note in bench_report.launches_notes(result)))
    if figures_file is not None:
        with writing(figures_file):
            figures_file.write_text(json.dumps(bench_report.as_json(result), indent=1) + "\n", encoding="utf-8")
