"""Where commands write: stdout, reserved for a command's result, and files, checked before the work begins.

Vendors' packages print to stdout, from Python and C, and so do their child processes. While a hal command runs, that
output is redirected to stderr, and only :func:`echo` writes to the original stdout.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import sys
import tempfile
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TextIO

import click

from hal.errors import ConfigError, HalError

STDOUT, STDERR = 1, 2
"""File descriptors."""

_stream: ContextVar[TextIO | None] = ContextVar("_stream")


class OutputError(HalError):
    """A command's result or a file cannot be written."""


class NoReader(Exception):
    """The reader of stdout is gone, as with ``| head``."""


class ResultCommand(click.Command):
    """A command that writes its result with :func:`echo`; all other output to stdout is redirected to stderr."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. An option of one value that is given twice is an error: click would drop the first."""
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for option in given:
            takes_one = isinstance(option, click.Option) and not (option.multiple or option.is_flag or option.count)
            if takes_one and given.count(option) > 1:
                raise click.UsageError(f"Option '{option.opts[0]}' takes one value, and is given more than once.", ctx)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command."""
        with stdout_for_results():
            return super().invoke(ctx)


def result_stream() -> TextIO:
    """Return the stream of results.

    Raises:
        OutputError: the process has no stdout.
    """
    stream = _stream.get(sys.stdout)
    if stream is None:
        raise OutputError("the result cannot be written: stdout is closed", "start hal with an open stdout")
    return stream


def echo(message: str | bytes = "", nl: bool = True) -> None:
    """Write a part of the result.

    Raises:
        OutputError: it cannot be written, for example because the disk is full.
        NoReader: the reader of stdout is gone.
    """
    try:
        click.echo(message, file=result_stream(), nl=nl)
    except OSError as error:
        raise _failure(error) from error


@contextlib.contextmanager
def stdout_for_results() -> Iterator[None]:
    """Redirect stdout to stderr inside the block, for Python, C and child processes, except for :func:`echo`."""
    stream = sys.stdout
    if stream is not None:
        stream.flush()
    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(_descriptor_to_stderr())
        if stream is not None and _is_the_process_own(stream):
            stream = stack.enter_context(_opened(kept, stream))
        token = _stream.set(stream)
        stack.callback(_stream.reset, token)
        # Without a stderr, sys.stderr is None, which code that calls sys.stdout.write does not handle.
        noise = sys.stderr or stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        stack.enter_context(contextlib.redirect_stdout(noise))
        yield


def end_stdout() -> None:
    """Flush Python's and C's buffers of stdout, and redirect later output to stderr.

    Libraries also print when the process exits.

    Raises:
        OutputError: buffered output cannot be written and is lost.
        NoReader: the reader of stdout is gone.
    """
    if sys.stdout is None or not _is_the_process_own(sys.stdout):
        return
    try:
        _flush()
    except OSError as error:
        _point_at_nothing(STDOUT)  # Python would retry to write its buffer
        _flush()
        raise _failure(error) from error
    finally:
        _point_at_stderr(STDOUT)


def has_lost_its_reader() -> bool:
    """Return whether the process's stdout or stderr is a pipe without a reader."""
    if not hasattr(select, "poll"):  # Windows
        return True
    poll = select.poll()
    for descriptor in (STDOUT, STDERR):
        poll.register(descriptor, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _failure(error: OSError) -> Exception:
    if isinstance(error, BrokenPipeError):
        return NoReader()
    problem = f"the result cannot be written to stdout: {error.strerror}"
    return OutputError(problem, "free disk space, or redirect it elsewhere")


def _is_the_process_own(stream: TextIO) -> bool:
    try:
        return stream.fileno() == STDOUT
    except (OSError, ValueError):  # no descriptor, or closed
        return False


@contextlib.contextmanager
def _descriptor_to_stderr() -> Iterator[int]:
    """Redirect descriptor 1 to stderr inside the block; yield a duplicate of the original."""
    try:
        kept = os.dup(STDOUT)
    except OSError:  # closed
        _point_at_nothing(STDOUT)
        kept = os.dup(STDOUT)
    _point_at_stderr(STDOUT)
    try:
        yield kept
        _flush()
    finally:
        os.dup2(kept, STDOUT)
        os.close(kept)


@contextlib.contextmanager
def _opened(descriptor: int, like: TextIO) -> Iterator[TextIO]:
    """Open a stream with the encoding of ``like`` on another descriptor."""
    stream = open(descriptor, "w", encoding=like.encoding, errors=like.errors, closefd=False)  # noqa: SIM115
    try:
        yield stream
    finally:
        with contextlib.suppress(OSError):  # echo has already raised it
            stream.close()


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)


def _point_at_stderr(descriptor: int) -> None:
    try:
        os.dup2(STDERR, descriptor)
    except OSError:  # closed
        _point_at_nothing(descriptor)


def _point_at_nothing(descriptor: int) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)


def check_file(file: Path) -> None:
    """Raise ConfigError unless ``file`` can be written or created; leave it unchanged."""
    made = not os.path.lexists(file)
    try:
        with file.open("ab"):
            pass
        if made:
            file.unlink()
    except OSError as error:
        raise _unwritable(file, error) from None


def check_folder(folder: Path) -> None:
    """Raise ConfigError unless files can be created in ``folder``, or in its nearest existing parent; leave nothing."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(each))
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise _unwritable(folder, error) from None


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise OutputError if writing ``path``, or files in it, fails inside the block."""
    try:
        yield
    except OSError as error:
        problem = f"{error.filename or path} cannot be written: {error.strerror or error}"
        raise OutputError(problem, "free disk space, or choose another path") from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path} cannot be written: {error.strerror}", "choose a path in an existing folder with write permission"
    )
