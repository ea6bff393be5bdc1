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
from operator import itemgetter

import torch

from hal.device.host_capacity import RunningThreads, affinity_cores, usable_cores

PERIOD = 0.005
"""Least seconds between two counts of running threads."""
PATIENCE = 0.2
"""Seconds for which cores must be free before one more thread uses them."""
LONGEST_PATIENCE = 6.4
"""The bound to which patience doubles while another process comes back soon after each increase."""
SETTLED = 4.0
"""Seconds after an increase from which a decrease has another cause, so that patience is short again."""
RUNNING = itemgetter(1)
"""Returns the running threads of a count. A step that counts calls no Python function for each."""


class ThreadCount:
    """Sets torch's number of threads from step to step.

    At first it leaves cores to the running threads of other processes. At the end of a step, when this process's own
    threads still run, it counts the running threads of the machine. More than there are cores in two counts in a row:
    this process gives up half of the excess. Fewer for a while: it takes half of the free cores. Two processes that do
    so end with half of the cores each.

    A number that the program sets in between, with ``torch.set_num_threads``, becomes the most. On systems that do not
    count running threads, the number stays as it is.

    All CPU backends of a process share one, since torch has one number of threads. It changes the number of a thread
    that runs a step or loads weights, and of no other.

    Attributes:
        most: the most threads: torch's number, or fewer for a quota, if that number is torch's default.
    """

    def __init__(self, cores: int, running: RunningThreads) -> None:
        self._before = torch.get_num_threads()
        chosen = "OMP_NUM_THREADS" in os.environ or self._before != affinity_cores()
        self.most = self._before if chosen else min(self._before, usable_cores())
        self._running = running
        self._cores = cores
        self._counting = running.known and affinity_cores() == os.cpu_count()  # else others may run on other cores
        self._lock = threading.Lock()
        self._counts: deque[tuple[float, int]] = deque()
        self._patience, self._next, self._increased = PATIENCE, 0.0, -math.inf
        self._number = self.most
        self._number = self._fewer(self._others() + self.most)
        # torch keeps a number for each thread of the program, which in a new one is the last that was set in any.
        self._here = threading.local()
        self._applied = {self._before}

    def _others(self) -> int:
        """Return how many threads of other processes run, in the quietest of three moments."""
        if self.most == 1 or not self._counting:
            return 0
        fewest = self._running.count()
        for _ in range(2):
            if fewest > 1:
                time.sleep(0.001)
                fewest = min(fewest, self._running.count())
        return fewest - 1

    def _fewer(self, running: int) -> int:
        """Return the number after half of an excess is given up."""
        excess = max(0, running - self._cores)
        return max(1, self._number - (excess + 1) // 2)

    def use(self) -> None:
        """Use the chosen number in this thread, or adopt the number that the program has set in it since."""
        now = torch.get_num_threads()
        here = getattr(self._here, "number", None)
        if now not in self._applied if here is None else now != here:
            with self._lock:  # Another thread of the program may read the counts.
                self.most = self._number = now
                self._counts.clear()
        self._apply(now)

    def after_step(self) -> None:
        """Count the running threads, and choose the number of this process's for the next step."""
        now = time.monotonic()
        if self.most == 1 or now < self._next or not self._counting or not self._lock.acquire(blocking=False):
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
        last = [*map(RUNNING, list(self._counts)[-2:])]
        if len(last) == 2 and min(last) > self._cores and self._number > 1:
            soon = now - self._increased < SETTLED
            self._patience = min(2 * self._patience, LONGEST_PATIENCE) if soon else PATIENCE
            self._change(self._fewer(min(last)))
            return
        while len(self._counts) > 1 and self._counts[1][0] <= now - self._patience:
            self._counts.popleft()
        free = self._cores - max(map(RUNNING, self._counts))
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
        self._applied.add(self._number)

    def restore(self) -> None:
        """Restore torch's number of threads, unless the program has set another."""
        if torch.get_num_threads() == self._number != self._before:
            torch.set_num_threads(self._before)


class SharedThreadCount:
    """Gives all backends of the process one :class:`ThreadCount`, which lasts while any of them is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = RunningThreads()
        self._count: ThreadCount | None = None
        self._users = 0

    def open(self) -> ThreadCount:
        """Return the count, made for the first user."""
        with self._lock:
            self._count = self._count or ThreadCount(os.cpu_count() or 1, self._running)
            self._users += 1
            return self._count

    def close(self) -> None:
        """Restore torch's number of threads after the last user."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._count is not None:
                self._count.restore()
                self._count = None


SHARED = SharedThreadCount()
