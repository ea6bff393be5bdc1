"""The console script ``hal``: installs signal handling before it imports hal and torch, which takes seconds.

An interrupt ends the process with exit status 130 and without a traceback, during import, command and shutdown alike.
"""

from __future__ import annotations

import _thread
import os  # only modules that Python has loaded already: before the handler is set, an interrupt prints a traceback
import signal
import sys
import time

INTERRUPTED = 130
"""Exit status of an interrupted program by shell convention: 128 plus the number of SIGINT."""
GRACE = 5.0
"""Seconds allowed for cleanup after an interrupt; code that still runs then has swallowed it."""
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""The environment variable that tells a process that torchrun has started it."""


class Interrupts:
    """The handler of SIGINT.

    While the command runs, the first interrupt raises KeyboardInterrupt, which cleans up files and child processes. Any
    other interrupt ends the process immediately. So does the first one during the import of torch, or if a library
    swallows it.

    Attributes:
        raising: whether the command runs, so that an interrupt raises KeyboardInterrupt.
        seen: whether KeyboardInterrupt was raised.
    """

    def __init__(self) -> None:
        self.raising = self.seen = False

    def handle(self, number: int, frame: object) -> None:
        """Handle a signal."""
        if not self.raising or self.seen or _is_importing_torch():
            _leave()
        self.seen = True
        _thread.start_new_thread(_leave_after, (GRACE,))
        raise KeyboardInterrupt

    def unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """End the process on an interrupt in a destructor or callback, where Python would print and drop it."""
        if unraisable.exc_type is KeyboardInterrupt:
            _leave()
        sys.__unraisablehook__(unraisable)


def main() -> None:
    """Run the command and end the process."""
    _open_closed_streams()
    interrupts = Interrupts()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # background jobs ignore SIGINT
        signal.signal(signal.SIGINT, interrupts.handle)
        sys.unraisablehook = interrupts.unraisable
    status: object = INTERRUPTED
    try:
        status = _run(interrupts)
    except BaseException:
        if not interrupts.seen:
            raise
    raise SystemExit(INTERRUPTED if interrupts.seen else status)


def _run(interrupts: Interrupts) -> object:
    if TORCHRUN in os.environ and sys.platform == "linux" and os.getsid(0) == os.getpid():  # not a rank's child
        _end_with_parent()
    from hal.cli import main as command

    try:
        interrupts.raising = True
        return command()
    except SystemExit as ending:
        return ending.code
    finally:
        interrupts.raising = False


def _is_importing_torch() -> bool:
    """Return whether the first import of torch is under way.

    Its C++ code imports Python modules, and aborts the process if one raises. Before it there is nothing to clean up.
    """
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _end_with_parent() -> None:
    """Let the system kill this process when its parent ends; torchrun ends its ranks unless it is killed itself.

    The parent is the thread that started this process, and torchrun starts its ranks in its main thread.

    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == 1 and not _is_python(1):  # The parent ended before; in a container, torchrun may be process 1.
        os.kill(os.getpid(), signal.SIGKILL)


def _is_python(process: int) -> bool:
    """Return whether a process runs Python; True if the system does not tell."""
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            return b"python" in file.read().partition(b"\0")[0]
    except OSError:
        return True


def _open_closed_streams() -> None:
    """Open closed descriptors 0, 1 and 2 on the null device, so that no file opened later takes their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _leave_after(seconds: float) -> None:
    time.sleep(seconds)
    _leave()


def _leave() -> None:
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
