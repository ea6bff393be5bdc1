"""``hal compare``: whether two backends, or the modes of one, compute the same; and if not, where that begins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from hal.cli.commands.generate import PROMPTS_FILE, check_prompts, prompt_lines
from hal.cli.config_options import COMPILATION_CONFIG, settings_of
from hal.cli.console import print_table
from hal.cli.emulation import emulated
from hal.cli.stdout import ResultCommand, echo
from hal.errors import ConfigError

if TYPE_CHECKING:
    from hal.checkpoint.checkpoint import Checkpoint
    from hal.compare.comparison_results import Comparison
    from hal.compare.texts import Prompts
    from hal.drivers.backend import Backend

BACKENDS = "Two drivers, as cpu,npu: the first is the reference. With --compilers, one."
COMPILERS = "Modes of one backend, as eager,graph,piecewise: the first is the reference."
EMULATE = "Run the drivers that can on an emulated device: the same as their option emulator."
SAVE = "Write the first operation out of tolerance into the new folder DIR: its arguments and both results."


@click.command(cls=ResultCommand, short_help="Compare two backends, or the modes of one.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--backends", metavar="NAMES", help=BACKENDS)
@click.option("--compilers", metavar="NAMES", help=COMPILERS)
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="A prompt, taken as it is. Repeatable.")
@click.option("--prompts-file", type=click.File("rb"), metavar="FILE", help=PROMPTS_FILE)
@click.option("--max-new-tokens", type=int, default=16, show_default=True, help="At most so many a prompt.")
@click.option("--dtype", metavar="NAME", help="auto (the checkpoint's own), float32, bfloat16 or float16.")
@click.option("--emulate", is_flag=True, help=EMULATE)
@click.option("--compilation-config", metavar="JSON", help=f"{COMPILATION_CONFIG} For all modes of --compilers.")
@click.option("--save", "save_to", type=click.Path(path_type=Path), metavar="DIR", help=SAVE)
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of tables.")
@click.pass_context
def command(
    context: click.Context,
    checkpoint: Path,
    backends: str | None,
    compilers: str | None,
    prompts: Sequence[str],
    prompts_file: BinaryIO | None,
    max_new_tokens: int,
    dtype: str | None,
    emulate: bool,
    compilation_config: str | None,
    save_to: Path | None,
    as_json: bool,
) -> None:
    """Compare what two backends compute with the model in the folder CHECKPOINT, or two modes of one backend.

    All prompts run together, and their likeliest tokens are taken. Two backends are compared operation by operation, on
    the same arguments; modes by what they write into the KV cache, layer by layer, and by their logits.

    The exit status is 0 if everything is within tolerance, 1 if not, and 2 if it could not be compared.
    """
    from hal.checkpoint.checkpoint import Checkpoint
    from hal.compare import comparison_report
    from hal.config import Config, read

    named, modes = _names(backends, "--backends"), _names(compilers, "--compilers")
    _check_options(named, modes, save_to, compilation_config)
    texts = [*prompts, *(prompt_lines(prompts_file) if prompts_file else ())]
    check_prompts(texts)
    settings = settings_of(None, dtype, None, compilation_config)
    read(Config, settings, "configuration")
    opened = Checkpoint.open(checkpoint)
    prompted = _prompts(opened, texts, max_new_tokens)
    if modes:
        from hal.compare.modes import compare_modes

        (backend,) = _opened(named or [settings.get("backend", "auto")], settings, emulate)
        backend.activate()
        found = compare_modes(opened, backend, modes, prompted)
    else:
        from hal.compare.backends import compare_backends

        # Two backends run eagerly, whatever the environment says of compiling.
        first, second = _opened(named, {**settings, "compilation": {}}, emulate)
        found = (compare_backends(opened, first, second, prompted, save_to=save_to),)
    if as_json:
        echo(json.dumps([comparison_report.as_json(each) for each in found], indent=1))
    else:
        for each in found:
            _print(each)
    if save_to is not None:
        kept = any(each.broken for each in found)
        click.echo(f"saved in {save_to}" if kept else "nothing was saved: no operation is out of tolerance", err=True)
    context.exit(0 if all(each.agrees for each in found) else 1)


def _names(option: str | None, what: str) -> list[str]:
    """The names in an option's list."""
    if option is None:
        return []
    names = [name.strip() for name in option.split(",")]
    if not all(names):
        raise ConfigError(f"{what} is {option!r}", "give names with commas between them")
    return names


def _check_options(backends: list[str], modes: list[str], save_to: Path | None, compilation_config: str | None) -> None:
    if modes:
        if len(backends) > 1:
            raise ConfigError(
                f"--compilers compares modes of one backend, and --backends names {len(backends)}",
                "name one, or leave --compilers out",
            )
        if save_to is not None:
            raise ConfigError(
                "--save was given with --compilers, and a compiled step calls no operations that could be saved",
                "leave it out, or compare backends",
            )
    elif len(backends) != 2:
        raise ConfigError(
            f"--backends names {len(backends)} backend{'' if len(backends) == 1 else 's'}, and two are compared",
            "name two, as in --backends cpu,npu; or compare the modes of one by --compilers eager,graph",
        )
    elif compilation_config is not None:
        raise ConfigError(
            "--compilation-config was given without --compilers; two backends are compared eagerly",
            "leave it out, or compare modes of one backend",
        )


def _prompts(checkpoint: Checkpoint, texts: Sequence[str], max_new_tokens: int) -> Prompts:
    from hal.compare.texts import Prompts

    tokenizer = checkpoint.tokenizer()
    return Prompts(tuple(tuple(tokenizer.encode(text).ids) for text in texts), max_new_tokens,
                   checkpoint.stop_token_ids)  # fmt: skip


def _opened(names: Sequence[str], settings: Mapping[str, Any], emulate: bool) -> list[Backend]:
    """Each opened, and none active; with ``--emulate`` on an emulated device where the driver has one."""
    opened: list[Backend] = []
    refused: list[ConfigError] = []
    for name in names:
        try:
            opened.append(_open(name, settings, emulate))
        except ConfigError as error:
            if not emulate or "has no emulated device" not in error.problem:
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
