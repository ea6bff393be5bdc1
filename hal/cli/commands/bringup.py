"""``hal bringup``: the first day on a device, in one command and one folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import click

from hal.cli.config_options import EMULATE, Seconds, emulated
from hal.cli.console import progress_on_stderr
from hal.cli.stdout import ResultCommand, check_folder, echo, writing
from hal.errors import ConfigError

AGAINST = "The driver that computes the reference."
CONFORMANCE = "The cases of the conformance suite: without whole models and in one dtype, all, or none."
LIMIT = "Seconds that each part may take."
OUTPUT = "The folder to write, which must not exist.  [default: bringup-BACKEND]"


@click.command("bringup", cls=ResultCommand)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--backend", required=True, metavar="NAME", help="The driver to bring up; see `hal backends`.")
@click.option("--against", default="cpu", show_default=True, metavar="NAME", help=AGAINST)
@click.option("--emulate", is_flag=True, help=EMULATE)
@click.option("--dtype", default="float16", show_default=True, metavar="NAME", help="float32, bfloat16 or float16.")
@click.option(
    "--conformance", type=click.Choice(["short", "whole", "none"]), default="short", show_default=True, help=CONFORMANCE
)
@click.option("--limit", type=Seconds(), default=1800, show_default=True, help=LIMIT)
@click.option("--output", type=click.Path(path_type=Path), metavar="FOLDER", help=OUTPUT)
@click.pass_context
def command(
    context: click.Context,
    checkpoint: Path,
    backend: str,
    against: str,
    emulate: bool,
    dtype: str,
    conformance: Literal["short", "whole", "none"],
    limit: float,
    output: Path | None,
) -> None:
    """Check a device with the model CHECKPOINT, a folder, a GGUF file or a name of the Hugging Face Hub.

    It runs `hal doctor`, the conformance suite, `hal generate` on both drivers, `hal compare` and `hal bench`, each in
    a process of its own with a time limit, and goes on after a failure. The folder gets index.html, a page to read;
    report.json, the document to send with a bug report; and the output of each part.

    Exits with 1 if a part failed or was late.
    """
    from hal.bringup.parts import Request
    from hal.bringup.run_parts import as_json, page, run_parts
    from hal.checkpoint.checkpoint import Checkpoint
    from hal.drivers.registry import driver_names, load_driver

    for name in (backend, against):
        if name not in driver_names():
            load_driver(name)  # Its error names those that there are. A driver that fails to load is a part's result.
    folder = (output or Path(f"bringup-{backend}")).absolute()
    if folder.exists():
        raise ConfigError(f"{folder} exists already", "choose another folder with --output, or remove it first")
    check_folder(folder)
    Checkpoint.open(checkpoint)
    request = Request(
        checkpoint=str(checkpoint),
        backend=backend,
        against=against,
        emulate=emulate,
        dtype=dtype,
        conformance=conformance,
        seconds=limit,
    )
    with emulated(emulate, backend) as options, writing(folder):
        folder.mkdir(parents=True)
        outcomes = run_parts(request, options, folder, progress_on_stderr())
        (folder / "report.json").write_text(json.dumps(as_json(request, outcomes), indent=1) + "\n", encoding="utf-8")
        (folder / "index.html").write_text(page(request, outcomes), encoding="utf-8")
    echo(str(folder / "index.html"))
    context.exit(0 if all(each.status == "passed" for each in outcomes) else 1)
