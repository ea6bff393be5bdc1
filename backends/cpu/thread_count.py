"""The number of threads of a step: the cores that other processes leave free.

Threads that wait for each other after every kernel need a core each. If another process takes one, all wait for the
thread that lost its core, and a step takes many times as long as with one thread.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque

import torch

from hal.device.host_cores import RunningThreads, usable_cores

PERIOD = 0.005
"""Least seconds between two counts of running threads."""
PATIENCE = 0.2
"""Seconds for which cores must be free before a thread more uses them."""
LONGEST_PATIENCE = 6.4
"""The bound to which patience doubles while another process comes back soon after each increase."""
SETTLED = 4.0
"""Seconds after an increase from which a decrease has another cause, so that patience is short again."""


class ThreadCount:
    """Sets torch's number of threads from step to step.

    At first it leaves cores to the running threads of other processes. At the end of a step, when this process's own
    threads still run, it counts the running threads of the machine. More than there are cores in two counts in a row:
    this process gives up half of the excess. Fewer for a while: it takes half of the free cores. Two processes that do
    so end with half of the cores each.

    A number that the program sets in between, with ``torch.set_num_threads``, becomes the most. On systems that do not
    count running threads, the number stays as it is.

    Args:
        cores: the cores of the machine; None for as many as it has.
        running: counts the running threads.

    Attributes:
        most: the most threads: torch's number, which is that of OMP_NUM_THREADS if it is set, or the quota's if less.
    """

    def __init__(self, cores: int | None = None, running: RunningThreads | None = None) -> None:
        self._before = torch.get_num_threads()
        self.most = self._before if "OMP_NUM_THREADS" in os.environ else min(self._before, usable_cores())
        self._running = running or RunningThreads()
        self._cores = cores or os.cpu_count() or 1
        self._lock = threading.Lock()
        self._counts: deque[tuple[float, int]] = deque()
        self._patience, self._next, self._increased = PATIENCE, 0.0, -math.inf
        self._number = self.most
        self._number = self._fewer(self._others() + self.most)
        self._here = threading.local()  # torch keeps a number for each thread of the program.
        self._apply(self._before)

    def _others(self) -> int:
        """Return how many threads of other processes run, in the quietest of three moments."""
        if self.most == 1 or not self._running.known:
            return 0
        counts = [self._running.count()]
        for _ in range(2):
            time.sleep(0.001)
            counts.append(self._running.count())
        return min(counts) - 1

    def _fewer(self, running: int) -> int:
        """Return the number after half of an excess is given up."""
        excess = max(0, running - self._cores)
        return max(1, self._number - (excess + 1) // 2)

    def before_step(self) -> None:
        """Use the chosen number in this thread, or adopt the number that the program has set in it since."""
        now = torch.get_num_threads()
        if now != getattr(self._here, "number", now):
            self.most = self._number = now
            self._counts.clear()
        self._apply(now)

    def after_step(self) -> None:
        """Count the running threads, and choose the number of this process's for the next step."""
        now = time.monotonic()
        if self.most == 1 or now < self._next or not self._running.known or not self._lock.acquire(blocking=False):
            return
        try:
            self._next = now + PERIOD
            self.observe(now, self._running.count())
        finally:
            self._lock.release()

    def observe(self, now: float, running: int) -> None:
        """Choose the number from a further count.

        Args:
            now: seconds of a monotonic clock.
            running: the running threads of the machine, this process's included.
        """
        self._counts.append((now, running))
        last = [running for _, running in list(self._counts)[-2:]]
        if len(last) == 2 and min(last) > self._cores and self._number > 1:
            soon = now - self._increased < SETTLED
            self._patience = min(2 * self._patience, LONGEST_PATIENCE) if soon else PATIENCE
            self._change(self._fewer(min(last)))
            return
        while len(self._counts) > 1 and self._counts[1][0] <= now - self._patience:
            self._counts.popleft()
        free = self._cores - max(running for _, running in self._counts)
        if free > 0 and self._number < self.most and self._counts[0][0] <= now - self._patience:
            self._increased = now
            self._change(min(self.most, self._number + (free + 1) // 2))

    def _change(self, number: int) -> None:
        self._number = number
        self._counts.clear()
        self._apply(torch.get_num_threads())

    def _apply(self, now: int) -> None:
        if now != self._number:
            torch.set_num_threads(self._number)
        self._here.number = self._number

    def close(self) -> None:
        """Restore torch's number of threads, unless the program has set another."""
        if torch.get_num_threads() == self._number != self._before:
            torch.set_num_threads(self._before)
        self._running.close()
