"""The console script ``hal``: what must be ready before hal, and with it torch, is imported, which takes seconds.

An interrupt ends the process with the status 130 and without a traceback, whatever Python is doing: importing, running
the command, or shutting down.
"""

from __future__ import annotations

import _thread
import os  # and nothing that is not imported already: until the handler is there, an interrupt is a traceback
import signal
import sys
import time

INTERRUPTED = 130
"""128 and the number of SIGINT: what shells expect of a program that was interrupted."""
GRACE = 5.0
"""Seconds that cleaning up may take. Whatever still runs after that has swallowed the interrupt."""


class Interrupts:
    """The handler of SIGINT.

    While the command runs, the first interrupt raises KeyboardInterrupt, so that files and child processes are cleaned
    up. Any other ends the process at once: there is nothing to clean up yet or any more, or the user will not wait.
    So does the first if it is lost, as libraries that catch everything do.

    Attributes:
        raising: whether the command runs.
        seen: whether KeyboardInterrupt was raised.
    """

    def __init__(self) -> None:
        self.raising = self.seen = False

    def handle(self, number: int, frame: object) -> None:
        """Handle a signal."""
        if not self.raising or self.seen:
            _leave()
        self.seen = True
        _thread.start_new_thread(_leave_after, (GRACE,))
        raise KeyboardInterrupt

    def unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Handle what a destructor or callback raised; an interrupt that hits one would be printed, and lost."""
        if unraisable.exc_type is KeyboardInterrupt:
            _leave()
        sys.__unraisablehook__(unraisable)


def main() -> None:
    """Run the command, and end the process."""
    _open_closed_streams()
    interrupts = Interrupts()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored: a job in the background
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
    from hal.cli import main as command

    try:
        interrupts.raising = True
        return command()
    except SystemExit as ending:
        return ending.code
    finally:
        interrupts.raising = False


def _open_closed_streams() -> None:
    """Occupy descriptors 0, 1 and 2 where they are closed, so that no file that is opened later takes their place."""
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
