"""The groups of commands, and the output that all commands share: errors, log records and tables."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from hal.cli.stdout import NoReader, echo, end_stdout, has_lost_its_reader, result_stream
from hal.config.child_process import ERROR_FILE
from hal.errors import HalError, most_similar
from hal.progress import Say, silent

HELP = "help"
_RUN = "'hal generate MODEL --prompt TEXT', or 'hal chat MODEL' for a conversation"
_DOWNLOADED = "'hf cache ls' for the downloaded models; a MODEL is a folder, a GGUF file, or a name of the Hub"
_FETCH = "'hf download NAME', or only run the model: hal downloads what it needs"
_MACHINE = "'hal backends' for the drivers, or 'hal doctor' to check this machine"
_COMPLETION = """'eval "$(_HAL_COMPLETE=bash_source hal)"' in bash; zsh_source and fish_source are for other shells"""

OTHER_TOOLS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("run", "complete", "prompt", "ask"), _RUN),
        **dict.fromkeys(("list", "ls", "models", "ps"), _DOWNLOADED),
        **dict.fromkeys(("pull", "download", "fetch"), _FETCH),
        **dict.fromkeys(("devices", "env", "info", "status"), _MACHINE),
        **dict.fromkeys(("completion", "completions"), _COMPLETION),
        "rm": "'hf cache rm NAME'",
        "show": "'hal explain MODEL'",
        "start": "'hal serve MODEL'",
        "version": "'hal --version'",
    }
)
"""Commands that other tools have, such as ollama, vLLM and pip, with what hal has for them."""


class SuggestingGroup(click.Group):
    """A command group that has ``help``, and that suggests commands for a name that it does not know.

    Attributes:
        takers: the names of commands that take a checkpoint.
        known_elsewhere: names that people know from other tools, with what to use.
    """

    takers: tuple[str, ...] = ()
    known_elsewhere: Mapping[str, str] = MappingProxyType({})

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name. ``help`` names the next one, whose help it asks for."""
        given, *others = args
        completing = ctx.resilient_parsing  # in a shell, which is told of no error
        if not completing and self.get_command(ctx, given) is None and not given.startswith("-"):
            if given != HELP:
                raise click.UsageError(self._no_command(ctx, given), ctx)
            if not others:
                click.echo(ctx.get_help())
                ctx.exit()
            return self.resolve_command(ctx, [*others, "--help"])
        return super().resolve_command(ctx, args)

    def _no_command(self, ctx: click.Context, given: str) -> str:
        if (instead := self.known_elsewhere.get(given)) is not None:
            return f"No such command '{given}'. Use {instead}."
        if self.takers and ("/" in given or Path(given).exists()):
            commands = [f"'{ctx.command_path} {name} {given}'" for name in self.takers]
            return f"'{given}' is no command. For a checkpoint, use {', '.join(commands[:-1])} or {commands[-1]}."
        names = self.list_commands(ctx)
        if (similar := most_similar(given, [*names, HELP])) is not None:
            return f"No such command '{given}'. Did you mean '{similar}'?"
        return f"No such command '{given}'. The commands are {', '.join(names)}."


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
    if (file := os.environ.get(ERROR_FILE)) is not None:  # of the starter, such as torchrun
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
