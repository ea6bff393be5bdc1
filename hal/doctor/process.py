"""Running a Python program that may raise, exit, crash or hang, and telling how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

LOG_LINES = 40


@attrs.frozen
class Ending:
    """How a process ended.

    Attributes:
        code: its exit status, negative for a signal; None if it was killed for taking too long.
        seconds: the time that it was given.
        log: the last lines that it wrote to stderr.
    """

    code: int | None
    seconds: float
    log: list[str]

    def __str__(self) -> str:
        if self.code is None:
            return f"it was killed after {self.seconds:g} s"
        if self.code < 0:
            return f"it died of {_signal(-self.code)}"
        return f"it exited with status {self.code}"


class Process:
    """Python that was started with ``arguments``; nothing that it does reaches this process.

    What it writes to stdout is dropped. The current folder is not on its path.
    """

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
        # To a file: whoever holds the end of a pipe, such as a child that it left behind, could keep us reading.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-X", "faulthandler", *arguments], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=self._stderr, env=dict(environ), start_new_session=True,
        )  # fmt: skip

    def poll(self) -> int | None:
        """Its exit status, if it has ended."""
        return self._process.poll()

    def wait(self, seconds: float) -> None:
        """Until it has ended, or for so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def end(self, seconds: float) -> Ending:
        """Kill it if it still runs, after the ``seconds`` that it was given. The last call."""
        code = self._process.poll()
        if code is None:
            _kill(self._process)
        with self._stderr:
            self._stderr.seek(0)
            lines = self._stderr.read().decode(errors="replace").splitlines()
        return Ending(code, seconds, lines[-LOG_LINES:])


def run_python(arguments: Sequence[str], seconds: float, environ: Mapping[str, str] = os.environ) -> Ending:
    """Run Python with ``arguments`` for at most ``seconds``, as :class:`Process` does."""
    process = Process(arguments, environ)
    try:
        process.wait(seconds)
    finally:
        ending = process.end(seconds)
    return ending


def package_file(name: str) -> str:
    """The path of a program beside this module, which Python then runs without importing hal."""
    return str(Path(__file__).with_name(name))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With everything that it started, unless that went its own ways."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    # One that a broken device holds in the kernel dies when that lets go.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
