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
    """A number of bytes, with a unit or without: 2000000, 512MiB, 8G."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read it."""
        found = re.fullmatch(r"(\d+)\s*([kmg]i?)?b?", str(value).strip().lower())
        if found is None:
            self.fail(f"{value!r} is no number of bytes; write 2000000, 512MiB or 8GiB.", param, ctx)
        return int(found[1]) * UNITS[found[2] or ""]


@click.command(short_help="Run PROGRAM on the emulated CANN.", context_settings={"allow_interspersed_args": False})
@click.option("--devices", type=click.IntRange(min=1), default=1, show_default=True, help="How many NPUs there are.")
@click.option("--memory", type=Bytes(), help="What each can allocate, such as 8GiB.")
@click.option("--soc", default="Ascend910B3", show_default=True, help="The SoC's name; torch_npu goes by it.")
@click.option("--version", metavar="TEXT", help="CANN's; torch_npu goes by it too.")
@click.option("--streams", type=click.IntRange(min=1), help="How many streams a device has, captured ones included.")
@click.option("--tasks", type=click.IntRange(min=1), help="How many tasks a device's captured graphs can hold.")
@click.option("--stall", type=click.IntRange(min=1), help="Seconds without work after which a waiting host gives up.")
@click.option("--seed", type=int, help="Reorder whatever streams may reorder, as this seed says.")
@click.option("--force", is_flag=True, help="Even though a real CANN is installed here.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- PROGRAM [ARGUMENT]...")
def command(program: Sequence[str], force: bool, **options: Any) -> None:
    """Run PROGRAM on the emulated CANN, with every process that it starts.

    The program needs no change: whatever imports torch_npu, there or in a child process, computes on this CPU. The
    first run on a machine compiles the emulated CANN, which takes about a minute and a g++.

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
        raise click.UsageError(f"There is no program {program[0]!r} on the PATH.")
    environ = dict(os.environ)
    prepare(environ, build(), chosen)
    os.execve(path, list(program), environ)
