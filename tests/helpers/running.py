"""The processes that a command has started, with their own children, found by a variable of their environment."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import psutil

MARK = "TEST_MARK"


@attrs.frozen
class Command:
    """A running command.

    Attributes:
        process: the command's process.
        mark: the value of the variable.
    """

    process: subprocess.Popen[bytes]
    mark: str

    def running(self) -> list[psutil.Process]:
        """Return the processes that run, with the command's own."""
        return [process for process, _ in self._found()]

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the processes of the ranks, without those that they have started."""
        found: dict[int, psutil.Process] = {}
        for process, environ in self._found():
            with contextlib.suppress(psutil.Error):
                if "RANK" in environ and process.ppid() == self.process.pid:
                    found[int(environ["RANK"])] = process
        return found

    def wait_until(self, is_so: Callable[[], bool], seconds: float = 120.0) -> None:
        """Wait until something is so, while the command runs."""
        until = time.monotonic() + seconds
        while not is_so():
            assert self.process.poll() is None, f"the command has ended with {self.process.returncode}"
            assert time.monotonic() < until, "it did not become so in time"
            time.sleep(0.02)

    def seconds_to_end(self, limit: float = 20.0) -> float:
        """Wait until no process runs, and return the time until none but the command's ran.

        The command's may take seconds of a busy machine to end Python, with all that torch holds.
        """
        start = time.monotonic()
        until = start + limit
        while others := [each for each in self.running() if each.pid != self.process.pid]:
            assert time.monotonic() < until, f"{others} still run"
            time.sleep(0.02)
        took = time.monotonic() - start
        self.process.wait(until - time.monotonic())
        return took

    def _found(self) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
        for number in psutil.pids():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(number)
                environ = process.environ()  # empty for one that has ended
                if environ.get(MARK) == self.mark:
                    yield process, environ


@contextlib.contextmanager
def command(arguments: Sequence[str | Path], folder: Path) -> Iterator[Command]:
    """Run Python with arguments inside the block. Afterwards, no process is left.

    Args:
        arguments: of Python.
        folder: an empty folder, for ``out``, ``err`` and, in ``temporary``, temporary files.
    """
    mark = uuid.uuid4().hex
    (folder / "temporary").mkdir()
    environ = {
        **os.environ,
        MARK: mark,
        "TMPDIR": str(folder / "temporary"),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # a cache, which stays; by default in TMPDIR
    }
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        started = Command(subprocess.Popen([sys.executable, *arguments], stdout=out, stderr=err, env=environ), mark)
        try:
            yield started
        finally:
            for process in started.running():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            started.process.wait()
