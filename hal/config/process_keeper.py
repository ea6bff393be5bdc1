"""Child processes that end with this process, whatever ends it, and a temporary folder that is removed then.

A process cannot clean up after SIGKILL. A :class:`ProcessKeeper` therefore starts a small process, the keeper, which
waits for the end of a pipe. The system closes the other end when this process ends. The keeper then kills every process
that has the keeper's token in its environment: the children of this process, and theirs.

The keeper runs this file by its path, so that it needs neither hal nor torch.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

VARIABLE = "PROCESS_KEEPERS"
"""The environment variable with the tokens of the keepers that a process ends with."""
ENDED, END = b"ended", b"end"
"""Messages to the keeper: ``ended``, no process is left; ``end``, kill those that are."""
QUIET = 0.5
"""Seconds without a process of the token after which none is to come, if this process may have died starting one."""
LONGEST = 10.0
"""Seconds after which the keeper gives up; the system cannot end a process that waits for a device."""
PAUSE = 0.02
"""Seconds between two looks at the processes."""


class ProcessKeeper:
    """A block that ends the processes which were started in it with :attr:`environ`, and their children.

    They end with this process if it ends before the block does.

    Args:
        environ: variables of the processes' environment; None for this process's.

    Attributes:
        environ: the environment to start the processes with.
        folder: a temporary folder, which is removed at the end.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        import psutil

        given = os.environ if environ is None else environ
        token = secrets.token_hex(16)
        self.environ = {**given, VARIABLE: " ".join((*given.get(VARIABLE, "").split(), token))}
        self.folder = Path(tempfile.mkdtemp())
        self._ended = False
        packages = Path(psutil.__file__).parents[1]
        # Interrupts of the terminal do not reach a new session. This process's streams must end with this process.
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, token, str(self.folder), str(packages)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def ended(self) -> None:
        """Say that all processes have ended well, so that :meth:`close` does not look for any."""
        self._ended = True

    def close(self) -> None:
        """End the processes, and remove the folder."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._keeper.communicate(ENDED if self._ended else END, LONGEST + 1)
        shutil.rmtree(self.folder, ignore_errors=True)  # The keeper may itself have been killed.


def _keep(token: str, folder: str, packages: str) -> None:
    """Wait for the end of the pipe, then end the processes and remove the folder."""
    sys.path.append(packages)
    import psutil  # noqa: F401 - before the processes have to be ended

    if (told := sys.stdin.buffer.read()) != ENDED:
        _end(token, 0.0 if told == END else QUIET)
    shutil.rmtree(folder, ignore_errors=True)


def _end(token: str, quiet: float) -> None:
    import psutil

    begin = seen = time.monotonic()
    while (now := time.monotonic()) < begin + LONGEST:
        found = list(_with_token(token))
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if found:
            seen = now
        elif now >= seen + quiet:
            break
        time.sleep(PAUSE)


def _with_token(token: str) -> Iterator[Any]:
    import psutil

    for number in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):  # It has ended, or is another user's.
            process = psutil.Process(number)
            if token in process.environ().get(VARIABLE, ""):
                yield process


if __name__ == "__main__":
    _keep(*sys.argv[1:])
