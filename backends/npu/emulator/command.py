"""``hal emulate``: run any program on the emulated CANN."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from typing import Any

import click

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


@click.command(
    "emulate", short_help="Run PROGRAM on the emulated CANN.", context_settings={"allow_interspersed_args": False}
)
@click.option("--devices", type=click.IntRange(min=1), default=1, show_default=True, help="Number of NPUs.")
@click.option("--memory", type=Bytes(), help="Memory of each NPU, such as 8GiB.")
@click.option("--soc", default="Ascend910B3", show_default=True, help="SoC name that torch_npu sees.")
@click.option("--version", metavar="TEXT", help="CANN version that torch_npu sees.")
@click.option("--streams", type=click.IntRange(min=1), help="Streams per device, including those of captured graphs.")
@click.option("--tasks", type=click.IntRange(min=1), help="Maximum tasks in a device's captured graphs.")
@click.option("--stall", type=click.IntRange(min=1), help="Seconds without work after which a wait of the host fails.")
@click.option("--seed", type=int, help="Seed of a deterministic order in which streams run.")
@click.option("--force", is_flag=True, help="Run even if a real CANN is installed.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- PROGRAM [ARGUMENT]...")
def command(program: Sequence[str], force: bool, **options: Any) -> None:
    """Run PROGRAM and its child processes on the emulated CANN.

    The program needs no change: torch_npu computes on this CPU, also in child processes. The first run on a machine
    compiles the emulated CANN, which takes about a minute and requires g++, or the compiler that CXX names.

    \b
    hal emulate -- python script.py
    hal emulate --devices 2 --memory 8GiB -- torchrun --nproc-per-node 2 train.py
    """
    from hal.config import read

    from .activation import Options, prepare, refuse_real_cann
    from .build import build

    chosen = read(Options, options, "hal emulate")
    if not force:
        refuse_real_cann()
    path = shutil.which(program[0])
    if path is None:
        raise click.UsageError(f"The program {program[0]!r} is not on the PATH.")
    environ = dict(os.environ)
    prepare(environ, build(), chosen)
    os.execve(path, list(program), environ)
