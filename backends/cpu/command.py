"""``hal build-kernels``: compile the CPU driver's C++ kernels for machines without a compiler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click


@click.command("build-kernels", short_help="Compile the CPU driver's kernels for machines without a compiler.")
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option("--instructions", multiple=True, metavar="NAME", help="An instruction set. Repeatable; all by default.")
def command(folder: Path | None, instructions: Sequence[str]) -> None:
    """Compile the CPU driver's C++ kernels for each instruction set, and print the libraries.

    They do not depend on this machine's processor. By default, they are written where the driver looks for them on a
    machine without a compiler: into its package, and so into a wheel that is built afterwards. CXX may name a cross
    compiler. Each takes about half a minute.

    \b
    hal build-kernels
    CXX=aarch64-linux-gnu-g++ hal build-kernels
    """
    from .native.compiler import PREBUILT
    from .native.prebuilt import build

    for library in build(folder or PREBUILT, instructions):
        click.echo(library)
