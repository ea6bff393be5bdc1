"""What every command shares: errors, log records and tables as the reader meets them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from hal.errors import HalError

INTERRUPTED = 130
"""128 and the number of SIGINT: what shells expect of a program that was interrupted."""


class Commands(click.Group):
    """A group whose commands report what hal raises on purpose, and show the traceback of anything else."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; exit with 2 on a :class:`HalError`, 130 when interrupted."""
        try:
            return super().invoke(ctx)
        except HalError as error:
            click.echo(f"error: {error.problem}\nremedy: {error.remedy}", err=True)
            ctx.exit(2)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)


class _Stderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # Asks for stderr anew each time, because a progress bar replaces it while it is drawn.
        click.echo(f"{record.levelname.lower()}: {self.format(record)}", err=True)


@contextmanager
def logging_to_stderr(level: str) -> Iterator[None]:
    """Inside the block, hal's log records from ``level`` on go to stderr."""
    log, handler = logging.getLogger("hal"), _Stderr()
    before = log.level
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)
        log.removeHandler(handler)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to stdout: folded to a terminal's width, and one line a row where there is none."""
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = 1 << 16
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*row)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())
