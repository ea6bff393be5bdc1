"""Stdout, which belongs to a command's result alone.

Vendors' packages print, from Python and from C, and so do the processes that they start. While one of hal's own
commands runs, all of that goes to stderr, and :func:`echo` alone writes to what stdout was.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TextIO

import click

from hal.errors import HalError

STDOUT, STDERR = 1, 2
"""Descriptors."""

_stream: ContextVar[TextIO | None] = ContextVar("_stream")


class OutputError(HalError):
    """Something cannot be written: a command's result, or a file."""


class NoReader(Exception):
    """Nobody reads stdout any more, as behind ``| head``."""


class ResultCommand(click.Command):
    """A command that writes its result by :func:`echo`. Everything else goes to stderr, whatever writes it."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command."""
        with stdout_for_results():
            return super().invoke(ctx)


def result_stream() -> TextIO:
    """The stream of results.

    Raises:
        OutputError: the process was started without a stdout.
    """
    stream = _stream.get(sys.stdout)
    if stream is None:
        raise OutputError("the result cannot be written: stdout is closed", "start hal with one")
    return stream


def echo(message: str | bytes = "", nl: bool = True) -> None:
    """Write a part of the result.

    Raises:
        OutputError: it cannot be written, such as on a full disk.
        NoReader: nobody reads it any more.
    """
    try:
        click.echo(message, file=result_stream(), nl=nl)
    except OSError as error:
        raise _failure(error) from error


@contextlib.contextmanager
def stdout_for_results() -> Iterator[None]:
    """Inside the block, whatever writes to stdout other than by :func:`echo` writes to stderr: Python, C, children."""
    stream = sys.stdout
    if stream is not None:
        stream.flush()
    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(_descriptor_to_stderr())
        if stream is not None and _is_the_process_own(stream):
            stream = stack.enter_context(_opened(kept, stream))
        token = _stream.set(stream)
        stack.callback(_stream.reset, token)
        # Where there is no stderr, Python has None, which whoever prints by sys.stdout.write does not expect.
        noise = sys.stderr or stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        stack.enter_context(contextlib.redirect_stdout(noise))
        yield


def end_stdout() -> None:
    """Write what Python and C hold back of the process's stdout, and send to stderr what comes after.

    Libraries write when the process ends, too.

    Raises:
        OutputError: it cannot be written, and is lost.
        NoReader: nobody reads it any more.
    """
    if sys.stdout is None or not _is_the_process_own(sys.stdout):
        return
    try:
        _flush()
    except OSError as error:
        _point_at_nothing(STDOUT)  # Python keeps what it could not write, and would try again
        _flush()
        raise _failure(error) from error
    finally:
        _point_at_stderr(STDOUT)


def has_lost_its_reader() -> bool:
    """Whether the process's stdout or stderr is a pipe that nobody reads."""
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
    return OutputError(problem, "free space there, or send it elsewhere")


def _is_the_process_own(stream: TextIO) -> bool:
    try:
        return stream.fileno() == STDOUT
    except (OSError, ValueError):  # it has no descriptor, or is closed
        return False


@contextlib.contextmanager
def _descriptor_to_stderr() -> Iterator[int]:
    """Inside the block, descriptor 1 leads to stderr. Gives one that leads where 1 did."""
    try:
        kept = os.dup(STDOUT)
    except OSError:  # it is closed
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
    """A stream like another, on another descriptor."""
    stream = open(descriptor, "w", encoding=like.encoding, errors=like.errors, closefd=False)  # noqa: SIM115
    try:
        yield stream
    finally:
        with contextlib.suppress(OSError):  # echo has raised it before: it leaves nothing to be written
            stream.close()


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)


def _point_at_stderr(descriptor: int) -> None:
    try:
        os.dup2(STDERR, descriptor)
    except OSError:  # it is closed
        _point_at_nothing(descriptor)


def _point_at_nothing(descriptor: int) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)
