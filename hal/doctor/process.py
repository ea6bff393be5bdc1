"""A child process that runs Python and may raise, exit, crash or hang, and how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import attrs

from hal.config.process_keeper import ProcessKeeper

LOG_LINES = 40


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
            return f"it was terminated by {_signal(-self.code)}"
        return f"it exited with status {self.code}"


class Process:
    """A Python process with ``arguments``, isolated from this one.

    Its stdout is discarded, and the current folder is not on its path. It ends with this process, whatever ends that.
    """

    def __init__(self, arguments: Sequence[str], keeper: ProcessKeeper) -> None:
        # A file and not a pipe: an orphaned grandchild that holds the pipe's end would block reading.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-X", "faulthandler", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            env=keeper.environ,
            start_new_session=True,
        )

    def poll(self) -> int | None:
        """Return its exit status, or None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> None:
        """Wait until it ends, for at most ``seconds``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def end(self, seconds: float) -> Ending:
        """Kill it if it still runs, and return how it ended. ``seconds`` is the time that it was given."""
        code = self._process.poll()
        if code is None:
            _kill(self._process)
        with self._stderr:
            self._stderr.seek(0)
            lines = self._stderr.read().decode(errors="replace").splitlines()
        return Ending(code, seconds, lines[-LOG_LINES:])


def run_python(arguments: Sequence[str], seconds: float, keeper: ProcessKeeper) -> Ending:
    """Run Python with ``arguments`` for at most ``seconds``; see :class:`Process`."""
    process = Process(arguments, keeper)
    try:
        process.wait(seconds)
    finally:
        ending = process.end(seconds)
    return ending


def package_file(name: str) -> str:
    """Return the path of a program next to this module, which Python runs without importing hal."""
    return str(Path(__file__).with_name(name))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its process group."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    # A process that is blocked in the kernel by a device ends only when the kernel returns.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
