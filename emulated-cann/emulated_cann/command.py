"""The command ``emulated-cann``: run any program on the emulated CANN."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import click

from .errors import EmulationError

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


class Bytes(click.ParamType[int]):
    """A number of bytes with an optional unit: 2000000, 512MiB, 8G."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse the number."""
        found = re.fullmatch(r"(\d+)\s*([kmg]i?)?b?", str(value).strip().lower())
        if found is None:
            self.fail(f"{value!r} is not a number of bytes; write for example 2000000, 512MiB or 8GiB.", param, ctx)
        return int(found[1]) * UNITS[found[2] or ""]


@click.group()
@click.version_option(package_name="emulated-cann", prog_name="emulated-cann")
def command() -> None:
    """An emulated CANN, on which the unmodified torch_npu runs on this CPU."""


@command.command("build", short_help="Compile the emulated CANN.")
def build_command() -> None:
    """Compile the emulated CANN if its sources or torch_npu have changed, and print the folder with its libraries."""
    from .build import build

    click.echo(build())


@command.command(short_help="Run PROGRAM on the emulated CANN.", context_settings={"allow_interspersed_args": False})
@click.option("--devices", type=click.IntRange(min=1), default=1, show_default=True, help="Number of NPUs.")
@click.option("--memory", type=Bytes(), help="Memory of each NPU, such as 8GiB.")
@click.option("--soc", default="Ascend910B3", show_default=True, help="SoC name that torch_npu sees.")
@click.option("--version", metavar="TEXT", help="CANN version that torch_npu sees.")
@click.option("--streams", type=click.IntRange(min=1), help="Streams per device, including those of captured graphs.")
@click.option("--tasks", type=click.IntRange(min=1), help="Maximum tasks in a device's captured graphs.")
@click.option("--stall", type=click.IntRange(min=1), help="Seconds without work after which a wait of the host fails.")
@click.option("--seed", type=int, help="Seed of a deterministic order in which streams run.")
@click.option("--trace", type=click.Path(dir_okay=False, writable=True), help="File to write a trace for Perfetto to.")
@click.option("--races", is_flag=True, help="Report launches that race; the status is then 66.")
@click.option("--force", is_flag=True, help="Run even if a real CANN is installed.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- PROGRAM [ARGUMENT]...")
def run(program: Sequence[str], force: bool, **options: Any) -> None:
    """Run PROGRAM and its child processes on the emulated CANN.

    The program needs no change: torch_npu computes on this CPU, also in child processes. The first run on a machine
    compiles the emulated CANN, which takes minutes and requires g++, or the compiler that CXX names.

    \b
    emulated-cann run -- python script.py
    emulated-cann run --devices 2 --memory 8GiB -- torchrun --nproc-per-node 2 train.py
    """
    from .activation import prepare, refuse_real_cann
    from .build import build
    from .options import read_options

    if options["trace"] is not None:  # the program may change its folder
        options["trace"] = os.path.abspath(options["trace"])
    chosen = read_options(options, "the command")
    if not force:
        refuse_real_cann()
    path = shutil.which(program[0])
    if path is None:
        raise click.UsageError(f"The program {program[0]!r} is not on the PATH.")
    environ = dict(os.environ)
    prepare(environ, build(), chosen)
    os.execve(path, list(program), environ)


def main() -> None:
    """Run the command; an error of the emulated CANN ends it with status 2, as a wrong option does."""
    try:
        command(prog_name="emulated-cann")
    except EmulationError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
