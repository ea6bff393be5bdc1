"""``hal compare``: compare two backends, or the compile modes of one, and locate the first difference."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from hal.cli.config_options import (
    EMULATE_EACH,
    Settings,
    configured,
    emulated,
    has_no_emulator,
    start_ranks,
    tensor_parallel,
)
from hal.cli.console import print_table, progress_on_stderr
from hal.cli.generation_options import PROMPT, PROMPTS_FILE, Prompts, draft_options
from hal.cli.stdout import ResultCommand, echo
from hal.errors import ConfigError

if TYPE_CHECKING:
    from hal.checkpoint.checkpoint import Checkpoint
    from hal.compare import texts
    from hal.compare.comparison_results import Comparison
    from hal.drivers.backend import Backend
    from hal.generation.drafting.drafter import DraftConfig

BACKENDS = "A driver. Give it twice to compare two, of which the first is the reference; once with --compiler."
COMPILERS = "A compiler of the backend. Repeatable; the first is the reference."
RANKS = (
    "Compare N ranks that split the model, which are started if this process is none, with one device of the backend."
)
SAVE = "Save the first operation out of tolerance to the new folder DIR: its arguments and both results."


@click.command("compare", cls=ResultCommand, short_help="Compare two backends, or the compilers of one.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@tensor_parallel(RANKS)
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help=PROMPT)
@click.option("--prompts-file", type=click.File("rb"), metavar="FILE", help=PROMPTS_FILE)
@click.option("--max-new-tokens", type=int, default=16, show_default=True, help="Maximum per prompt.")
@draft_options
@configured(emulate=EMULATE_EACH, backend=BACKENDS, compiler=COMPILERS, compilation_config=" For all compilers.")
@click.option("--save", "save_to", type=click.Path(path_type=Path), metavar="DIR", help=SAVE)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.pass_context
def command(
    context: click.Context,
    checkpoint: Path,
    backends: Sequence[str],
    compilers: Sequence[str],
    tensor_parallel: int | None,
    prompts: Sequence[str],
    prompts_file: BinaryIO | None,
    max_new_tokens: int,
    draft: DraftConfig | None,
    settings: Settings,
    save_to: Path | None,
    as_json: bool,
) -> None:
    """Compare two backends, or compilers or ranks of one backend, with the model in the folder CHECKPOINT.

    All prompts run together with greedy decoding. Two backends are compared operation by operation, on equal arguments.
    Compilers are compared by the KV cache that they write, layer by layer, and by their logits. With --tensor-parallel,
    each rank is compared with one device, to the first operation whose result differs by more than rounding explains.
    With --draft, two backends are compared with the model that drafts, on the hidden states of the model CHECKPOINT.

    The exit status is 0 if everything is within tolerance, 1 if not, and 2 if the comparison failed.
    """
    from hal.checkpoint.checkpoint import Checkpoint
    from hal.checkpoint.hub import check_path
    from hal.compare import comparison_report
    from hal.config import ParallelConfig

    named, modes, compilation = list(backends), list(compilers), settings.given.get("compilation")
    if draft is not None and (modes or tensor_parallel is not None):
        raise ConfigError(
            f"--draft cannot be used with {'--compiler' if modes else '--tensor-parallel'}",
            "compare two backends, or give the drafter's checkpoint in place of the model's",
        )
    if tensor_parallel is None:
        _check_options(named, modes, save_to, compilation)
    else:
        _check_ranks(tensor_parallel, named, modes, save_to, compilation)
    check_path(checkpoint)  # before the prompts, whose lack would hide a mistyped path
    given = Prompts.read(prompts, prompts_file)
    merged, source, emulate = settings.merged(), settings.config().model_source, settings.emulate
    opened = Checkpoint.open(checkpoint)
    prompted = _prompts(opened, given, max_new_tokens, source)
    if tensor_parallel is not None:
        _check_split(merged)
        if not start_ranks(ParallelConfig(tensor_parallel), opened, given.stdin, source):
            name = (named or [merged.get("backend", "auto")])[0]
            context.exit(0 if _ranks_agree(opened, name, merged, tensor_parallel, prompted, emulate, as_json) else 1)
        return
    if modes:
        from hal.compare.compare_modes import compare_modes

        (backend,) = _opened(named or [merged.get("backend", "auto")], merged, emulate)
        backend.activate()
        found = compare_modes(opened, backend, modes, prompted, say=progress_on_stderr())
    else:
        from hal.compare.compare_backends import compare_backends

        # Two backends run eagerly, whatever the environment's compilation is.
        first, second = _opened(named, {**merged, "compilation": {}}, emulate)
        found = (
            compare_backends(opened, first, second, prompted, draft=draft, save_to=save_to, say=progress_on_stderr()),
        )
    if as_json:
        echo(json.dumps([comparison_report.as_json(each) for each in found], indent=1))
    else:
        for each in found:
            _print(each)
    if save_to is not None:
        kept = any(each.broken for each in found)
        click.echo(f"saved in {save_to}" if kept else "nothing saved: no operation is out of tolerance", err=True)
    context.exit(0 if all(each.agrees for each in found) else 1)


def _check_options(backends: list[str], modes: list[str], save_to: Path | None, compilation: object) -> None:
    if modes:
        if len(backends) > 1:
            raise ConfigError(
                f"--compiler compares compilers of one backend, but --backend names {len(backends)}",
                "give --backend once, or omit --compiler",
            )
        if save_to is not None:
            raise ConfigError(
                "--save cannot be used with --compiler: a compiled step calls no operations that could be saved",
                "omit it, or compare two backends",
            )
    elif len(backends) != 2:
        raise ConfigError(
            f"--backend names {len(backends)} backend{'' if len(backends) == 1 else 's'}; a comparison needs two",
            "give --backend twice, as in --backend cpu --backend npu; or compare compilers of one, as in "
            "--compiler eager --compiler graph",
        )
    elif compilation:
        raise ConfigError(
            "--compilation-config needs --compiler: two backends are compared eagerly",
            "omit it, or compare compilers of one backend",
        )


def _check_ranks(ranks: int, backends: list[str], modes: list[str], save_to: Path | None, compilation: object) -> None:
    others = {"--compiler": modes, "--save": save_to, "--compilation-config": compilation}
    if given := [name for name, value in others.items() if value]:
        raise ConfigError(
            f"{given[0]} cannot be used with --tensor-parallel: ranks are compared eagerly, by their results",
            f"omit {given[0]}, or --tensor-parallel",
        )
    if len(backends) > 1:
        raise ConfigError(
            f"--tensor-parallel compares ranks of one backend, but --backend names {len(backends)}", "name one backend"
        )
    if ranks < 2:
        raise ConfigError("--tensor-parallel 1 gives one rank, which has nothing to be compared with", "give 2 or more")


def _check_split(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if ranks share whole experts: they call other operations than a single device."""
    mode = settings.get("parallel", {}).get("experts", "split")
    if mode != "split":
        raise ConfigError(
            f"hal compare does not support ranks that share whole experts, and parallel.experts is {mode!r}",
            "leave parallel.experts, or the variable HAL_PARALLEL__EXPERTS, out",
        )


def _ranks_agree(
    opened: Checkpoint,
    name: str,
    settings: Mapping[str, Any],
    ranks: int,
    prompts: texts.Prompts,
    emulate: bool,
    as_json: bool,
) -> bool:
    """Compare this rank with one device. The first rank prints all findings, and returns whether all agree."""
    from hal.compare import comparison_report
    from hal.compare.compare_ranks import compare_ranks
    from hal.parallel.launch import gathered, yielding_to_the_cause

    eager = {**settings, "compilation": {}}
    with yielding_to_the_cause():
        alone = _open(name, {**eager, "parallel": {}}, emulate)
        rank = _open(name, {**eager, "parallel": {"tensor": ranks}}, emulate)
        found = gathered(
            compare_ranks(opened, alone, rank, prompts, say=progress_on_stderr(shown=rank.mesh.first)), rank.mesh
        )
    if not rank.mesh.first:
        return True  # Rank 0 ends with the status of all.
    if as_json:
        echo(json.dumps([comparison_report.rank_as_json(each) for each in found], indent=1))
    else:
        echo(comparison_report.rank_heading(found) + "\n")
        for line in comparison_report.rank_lines(found):
            echo(line)
    return all(each.agrees for each in found)


def _prompts(checkpoint: Checkpoint, given: Prompts, max_new_tokens: int, source: str) -> texts.Prompts:
    from hal.checkpoint.loading import build_model
    from hal.compare import texts

    tokenizer = checkpoint.tokenizer()
    encoded = given.encode(lambda text: tokenizer.encode(text).ids)
    most = min(max_new_tokens, build_model(checkpoint, source=source).max_length)  # The caches get room for as many.
    return texts.Prompts(tuple(map(tuple, encoded)), most, checkpoint.stop_token_ids)


def _opened(names: Sequence[str], settings: Mapping[str, Any], emulate: bool) -> list[Backend]:
    """Open each backend without activating it; with ``--emulate``, on an emulated device if the driver has one."""
    opened: list[Backend] = []
    refused: list[ConfigError] = []
    for name in names:
        try:
            opened.append(_open(name, settings, emulate))
        except ConfigError as error:
            if not emulate or not has_no_emulator(error):
                raise
            refused.append(error)
            opened.append(_open(name, settings, False))
    if len(refused) == len(names):
        raise refused[0]
    return opened


def _open(name: str, settings: Mapping[str, Any], emulate: bool) -> Backend:
    import hal
    from hal.config import Config, read

    with emulated(emulate, name) as options:
        given = {**settings, "backend": name, "options": {**settings.get("options", {}), **options}}
        return hal.open(read(Config, given, "configuration"), activate=False)


def _print(found: Comparison) -> None:
    from hal.compare import comparison_report

    echo(comparison_report.heading(found) + "\n")
    for line in comparison_report.lines(found):
        echo(line)
    echo()
    print_table(*comparison_report.table(found))
    echo()
