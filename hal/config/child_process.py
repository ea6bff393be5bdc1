"""A Python process that this one starts: it may raise, exit, crash or hang, and ends with this process."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import attrs

from hal.config.process_keeper import ProcessKeeper

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The variable that names the file to which a command of hal writes the error that ends it. torchrun sets it, too."""
LOG_LINES = 40
PACKAGE = Path(__file__).parents[1]

_NUMBERS = itertools.count()


@attrs.frozen
class Ending:
    """How a process ended.

    Attributes:
        code: exit status, negative for a signal; None if it was killed for exceeding its time.
        seconds: time that it was given.
        log: last lines of its stderr.
    """

    code: int | None
    seconds: float
    log: list[str]

    def __str__(self) -> str:
        if self.code is None:
            return f"it was killed after {self.seconds:g} s"
        if self.code < 0:
            return f"it was terminated by {signal_name(-self.code)}"
        return f"it exited with status {self.code}"


class ChildProcess:
    """A Python process, started by :func:`child_python`.

    Args:
        arguments: the arguments of Python, such as ``["-m", "package"]``.
        keeper: ends the process if this one ends.
        variables: environment variables to add to the keeper's.
        stdin: what the process reads: its content, or as for ``subprocess``; by default nothing.
        stdout: as for ``subprocess``; by default dropped.
        log: the file to append its stderr to; None for one in the keeper's folder.
        in_foreground: whether it shares this process's session, so that a terminal's signals reach both.
        shows_stderr: whether its stderr is this process's, in place of a log.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        keeper: ProcessKeeper,
        *,
        variables: Mapping[str, str] | None = None,
        stdin: bytes | int | None = subprocess.DEVNULL,
        stdout: IO[Any] | int | None = subprocess.DEVNULL,
        log: Path | None = None,
        in_foreground: bool = False,
        shows_stderr: bool = False,
    ) -> None:
        number = next(_NUMBERS)
        self._error = keeper.folder / f"error-{number}.json"
        self._log = None if shows_stderr else log or keeper.folder / f"log-{number}"
        self._own_session = not in_foreground
        with contextlib.ExitStack() as files:
            # A file and not a pipe: an orphaned grandchild that holds the pipe's end would block reading.
            errors = None if self._log is None else files.enter_context(self._log.open("ab"))
            given = files.enter_context(_file_of(stdin)) if isinstance(stdin, bytes) else stdin
            self._process = subprocess.Popen(
                [*child_python(), *arguments],
                stdin=given,
                stdout=stdout,
                stderr=errors,
                env={**keeper.environ, ERROR_FILE: str(self._error), **(variables or {})},
                start_new_session=self._own_session,
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return its exit status, or None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait until it ends, for at most ``seconds``; return its exit status, or None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def send(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        self._process.send_signal(number)

    def end(self, seconds: float) -> Ending:
        """Kill it and its process group if it still runs, and return how it ended.

        Args:
            seconds: the time that it was given.
        """
        code = self.poll()
        if code is None:
            if self._own_session and hasattr(os, "killpg"):
                os.killpg(self.pid, signal.SIGKILL)
            else:
                self._process.kill()
            self.wait(5)  # A process that is blocked in the kernel by a device ends only when the kernel returns.
        return Ending(code, seconds, self.stderr().splitlines()[-LOG_LINES:])

    def stderr(self) -> str:
        """Return what is in its log; nothing without one."""
        if self._log is None or not self._log.exists():
            return ""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def error(self) -> Mapping[str, Any]:
        """Return the error of hal's that a command ended with: ``message`` and ``key``; nothing if there is none."""
        found: dict[str, Any] = json.loads(self._error.read_text(encoding="utf-8")) if self._error.exists() else {}
        return found


def child_python() -> list[str]:
    """Return the command of a Python that imports the same hal as this process, also with ``-m`` or ``-c``.

    With these, Python searches the current folder first. ``-P`` leaves the folder out if it has another hal, as a
    checkout has.
    """
    other = Path("hal", "__init__.py")
    shadows = other.exists() and not other.samefile(PACKAGE / other.name)
    return [sys.executable, *(["-P"] if shadows else [])]


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects in a file of JSON lines, without a last line that is incomplete."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


@contextlib.contextmanager
def line_writer(file: Path) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a function that appends an object to a file of JSON lines, for a process that reads it meanwhile."""
    with file.open("a", encoding="utf-8", buffering=1) as stream:

        def write(entry: Mapping[str, Any]) -> None:
            stream.write(json.dumps(entry) + "\n")

        yield write


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``SIGKILL``."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


@contextlib.contextmanager
def _file_of(content: bytes) -> Iterator[IO[bytes]]:
    """Yield a temporary file with ``content``, to be read from the start."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield file
