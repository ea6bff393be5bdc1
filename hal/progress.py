"""Messages about the progress of a command that may run for minutes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Say = Callable[[str], None]
INTERVAL = 10.0
"""Seconds between two messages about the same part."""


def silent(text: str) -> None:
    """Ignore a message."""


def since_start(say: Say, clock: Callable[[], float] = time.perf_counter) -> Say:
    """Return a function that precedes each message by the seconds since this call."""
    start = clock()
    return lambda text: say(f"[{clock() - start:.0f} s] {text}")


@contextmanager
def going_on(
    say: Say, what: str, interval: float = INTERVAL, clock: Callable[[], float] = time.perf_counter
) -> Iterator[Callable[[int, int], None]]:
    """Say what the block does, and again at intervals while it lasts. Not for a block that is timed.

    Args:
        say: receives the messages, also from another thread.
        what: begins each message.
        interval: seconds between two messages.
        clock: returns seconds.

    Yields:
        A function that takes the amount done so far and the whole amount. After its first call, the messages say the
        share that is done, and how long the rest will take.
    """
    say(what)
    start, ended = clock(), threading.Event()
    share, end = "", start

    def done(amount: int, total: int) -> None:
        nonlocal share, end
        if amount:
            share, end = f"{amount / total:.0%}, ", start + (clock() - start) / amount * total

    def repeat() -> None:
        while not ended.wait(interval):
            left = end - clock()
            say(f"{what}: {share}{_left(left) if left > 0 else 'still running'}")

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield done
    finally:
        ended.set()
        thread.join()


class Rounds:
    """Says after the first round how long the others will take, and at intervals how long is left.

    Args:
        say: receives the messages.
        what: begins each message.
        rounds: the number of rounds.
        clock: returns seconds.
    """

    def __init__(self, say: Say, what: str, rounds: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._say, self._what, self._rounds, self._clock = say, what, rounds, clock
        self._start = self._said = clock()

    def ended(self, done: int) -> None:
        """Note that ``done`` rounds have ended."""
        now = self._clock()
        if done < self._rounds and (done == 1 or now - self._said >= INTERVAL):
            left = _left((now - self._start) / done * (self._rounds - done))
            self._say(f"{self._what}: {done} of {self._rounds} rounds, {left}")
            self._said = now


def _left(seconds: float) -> str:
    return f"about {max(seconds, 0):.0f} s left"
