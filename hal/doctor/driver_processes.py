"""Parallel examination of drivers, each in a separate process.

Checks run in parallel, measurements do not: a process that is ready to measure waits until no other one checks, and
then runs alone until it ends.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import attrs

from hal.config.process_keeper import ProcessKeeper
from hal.doctor.process import Ending, Process

MOST_PROCESSES = max(4, os.cpu_count() or 1)
"""Maximum number of processes that check in parallel. Each imports torch, which takes seconds of a core and 100 MB."""
PAUSE = 0.02
"""Seconds between polls of the processes."""
WAITING = "waiting"
"""Key that a process writes when it is ready to measure."""
TURN = "turn"
"""File next to its findings that grants the turn to measure."""


@attrs.frozen
class Told:
    """The output of a process.

    Attributes:
        lines: keys and values, in order.
        ending: how it ended.
        waited: whether it was killed while it waited to measure, without any failure.
    """

    lines: list[tuple[str, Any]]
    ending: Ending
    waited: bool


def examine_in_parallel(
    names: Sequence[str],
    options: Mapping[str, Any],
    seconds: float,
    deadline: float,
    say: Callable[[str], None] = lambda name: None,
) -> Generator[tuple[str, Told]]:
    """Examine drivers, and yield each one's output as soon as its process has ended.

    Args:
        names: names of the drivers.
        options: options of each, in addition to its environment's.
        seconds: time limit per driver, excluding waiting.
        deadline: time by ``time.monotonic`` at which all are killed; drivers not started by then are omitted.
        say: called with the name of each driver that is started.
    """
    queue, open_ = list(names), list[_Examination]()
    try:
        while queue or open_:
            late = time.monotonic() >= deadline
            for each in list(open_):
                each.look()
                if late or each.ended or each.used >= seconds:
                    open_.remove(each)
                    yield each.name, each.end()
            if late:
                return
            checking = [each for each in open_ if not each.waits]
            if not checking and not queue and open_:
                open_[0].let_measure()
            for name in queue[: max(0, MOST_PROCESSES - len(checking))]:
                queue.remove(name)
                say(name)
                open_.append(_Examination(name, options, seconds))
            time.sleep(PAUSE)
    finally:
        for each in open_:
            each.end()


class _Examination:
    """A process that examines a driver.

    Attributes:
        used: seconds that count against its limit.
        waits: whether it waits to measure, which does not count.
    """

    def __init__(self, name: str, options: Mapping[str, Any], seconds: float) -> None:
        self.name = name
        self.used, self.waits = 0.0, False
        self._seconds = seconds
        self._may_measure = False
        self._keeper = ProcessKeeper()
        self._file = self._keeper.folder / "findings"
        self._file.touch()
        arguments = ["-m", "hal.doctor.driver_program", name, json.dumps(options), str(self._file), str(seconds)]
        self._process = Process(arguments, self._keeper)
        self._looked = time.monotonic()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def look(self) -> None:
        """Update the attributes."""
        now = time.monotonic()
        if not self.waits:
            self.used += now - self._looked
        self._looked = now
        self.waits = not self._may_measure and any(key == WAITING for key, _ in self._lines())

    def let_measure(self) -> None:
        """Grant the turn to measure."""
        self._file.with_name(TURN).touch()
        self._may_measure, self.waits = True, False

    def end(self) -> Told:
        """Kill the process if it still runs, and return its output."""
        ending = self._process.end(round(min(self.used, self._seconds), 1))
        lines = list(self._lines())
        if ending.code == 0:
            self._keeper.ended()
        self._keeper.close()
        return Told(lines, ending, self.waits and ending.code is None)

    def _lines(self) -> Iterator[tuple[str, Any]]:
        for line in self._file.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):  # else the line is incomplete
                yield from json.loads(line).items()
