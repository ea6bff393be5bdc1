"""Output that all commands share: errors, log records and tables."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from hal.cli.stdout import NoReader, echo, end_stdout, has_lost_its_reader, result_stream
from hal.cli.suggestions import SuggestingGroup
from hal.errors import HalError
from hal.progress import Say, silent

INTERRUPTED = 130
"""Exit status of an interrupted program by shell convention: 128 plus the number of SIGINT."""
NO_READER = 141
"""Exit status of a program whose stdout has no reader: 128 plus the number of SIGPIPE."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
"""Error numbers for a disk that cannot be written."""


class Commands(SuggestingGroup):
    """A command group that prints hal's errors as problem and remedy, and the traceback of any other exception."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line, and exit with the command's status, or 2, 130 or 141 for the errors caught here."""
        run = functools.partial(super().main, args, prog_name, complete_var, standalone_mode=False, **extra)
        if not standalone_mode:
            return run()
        sys.exit(_status(run))

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse the command line."""
        with _detecting_lost_readers():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command."""
        with _detecting_lost_readers():
            return super().invoke(ctx)


def _status(run: Callable[[], Any]) -> int:
    status = 0
    try:
        try:
            found = run()
            status = found if isinstance(found, int) else 0
        finally:
            end_stdout()
    except HalError as error:
        return _failed(error.problem, error.remedy, error.key)
    except click.ClickException as error:
        with contextlib.suppress(OSError):
            error.show()
        return error.exit_code
    except click.Abort as error:
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        return _interrupted()
    except KeyboardInterrupt:
        return _interrupted()
    except NoReader:
        return NO_READER
    except OSError as error:
        if error.errno not in FULL:
            raise
        what = error.filename or "the output"
        return _failed(f"{what} cannot be written: {error.strerror}", "free disk space, or write elsewhere")
    return status


@contextlib.contextmanager
def _detecting_lost_readers() -> Iterator[None]:
    """Raise NoReader if stdout or stderr is a broken pipe; click exits silently for any pipe, such as a worker's."""
    try:
        yield
    except BrokenPipeError as error:
        raise NoReader if has_lost_its_reader() else RuntimeError("a pipe of this process is broken") from error


def _failed(problem: str, remedy: str, key: str | None = None) -> int:
    text = f"error: {problem}\nremedy: {remedy}"
    _tell(text)
    if (file := os.environ.get("TORCHELASTIC_ERROR_FILE")) is not None:  # of the starter, such as torchrun
        with contextlib.suppress(OSError):
            # torchrun shows the earliest error.
            error = {"message": text, "timestamp": str(int(time.time())), "key": key}
            Path(file).write_text(json.dumps(error), encoding="utf-8")
    return 2


def _interrupted() -> int:
    _tell("interrupted")
    return INTERRUPTED


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):  # stderr itself may be unwritable
        click.echo(text, err=True)


def progress_on_stderr(*, shown: bool = True) -> Say:
    """Return a function that writes progress messages to stderr if ``shown``."""
    return functools.partial(click.echo, err=True) if shown else silent


class _Stderr(logging.Handler):
    """Writes each warning once: a command may build a model, or read a file, several times."""

    def __init__(self) -> None:
        super().__init__()
        self._warned: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{record.levelname.lower()}: {self.format(record)}"
        if record.levelno >= logging.WARNING:
            if text in self._warned:
                return
            self._warned.add(text)
        # A progress bar replaces stderr for a time, and click would write past it to the stream below.
        click.echo(text, file=sys.stderr, err=True)


@contextlib.contextmanager
def logging_to_stderr(level: str) -> Iterator[None]:
    """Write hal's log records from ``level`` on to stderr inside the block.

    Python's warnings, which libraries address to the authors of programs, are written at the level DEBUG only.
    """
    handler = _Stderr()
    with contextlib.ExitStack() as stack:
        for name in ("hal", "py.warnings"):
            log = logging.getLogger(name)
            stack.callback(log.setLevel, log.level)
            stack.callback(log.removeHandler, handler)
            log.addHandler(handler)
            log.setLevel(level)
        handler.addFilter(lambda record: level == "DEBUG" or record.name != "py.warnings")
        logging.captureWarnings(True)
        stack.callback(logging.captureWarnings, False)
        yield


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to stdout, folded to the terminal's width; without a terminal, print one line per row."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=result_stream(), markup=False, highlight=False, emoji=False)
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
        echo(line.rstrip())


@contextlib.contextmanager
def progress_bar(title: str, *, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar of bytes on stderr, if ``shown`` and it is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = TextColumn(title), BarColumn(), DownloadColumn()
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
