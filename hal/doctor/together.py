"""Drivers examined side by side, each in a process of its own.

Checks run side by side. What is measured is not: a process that has come so far waits until no other one checks, and is
then alone until it ends.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from hal.doctor.process import Ending, Process

MOST = max(4, os.cpu_count() or 1)
"""Processes that check at a time. Each imports torch, which takes a core for seconds, and some hundred megabytes."""
PAUSE = 0.02
"""Seconds between looks at the processes."""
WAITING = "waiting"
"""What the process says when it has come to measuring."""
TURN = "turn"
"""The file beside its findings that lets it."""


@attrs.frozen
class Told:
    """What a process told before it ended.

    Attributes:
        lines: keys and values, in order.
        ending: how it ended.
        waited: whether it was killed while it waited to measure, and nothing is wrong with it.
    """

    lines: list[tuple[str, Any]]
    ending: Ending
    waited: bool


def examine_together(
    names: Sequence[str],
    options: Mapping[str, Any],
    seconds: float,
    deadline: float,
    say: Callable[[str], None] = lambda name: None,
) -> Generator[tuple[str, Told]]:
    """Examine drivers, and give what was told of each as soon as its process has ended.

    Args:
        names: the drivers'.
        options: of each, beyond its environment's.
        seconds: that each may take, waiting not counted.
        deadline: when all are killed, by ``time.monotonic``. Those that had not begun are left out.
        say: is told the name of each that begins.
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
            for name in queue[: max(0, MOST - len(checking))]:
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
        used: seconds of its time.
        waits: whether it waits to measure; that takes none of its time.
    """

    def __init__(self, name: str, options: Mapping[str, Any], seconds: float) -> None:
        self.name = name
        self.used, self.waits = 0.0, False
        self._seconds = seconds
        self._may_measure = False
        self._folder = tempfile.TemporaryDirectory()
        self._file = Path(self._folder.name) / "findings"
        self._file.touch()
        arguments = ["-m", "hal.doctor.subject", name, json.dumps(options), str(self._file), str(seconds)]
        self._process = Process(arguments)
        self._looked = time.monotonic()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def look(self) -> None:
        """Bring the attributes up to date."""
        now = time.monotonic()
        if not self.waits:
            self.used += now - self._looked
        self._looked = now
        self.waits = not self._may_measure and any(key == WAITING for key, _ in self._lines())

    def let_measure(self) -> None:
        """Give it its turn."""
        self._file.with_name(TURN).touch()
        self._may_measure, self.waits = True, False

    def end(self) -> Told:
        """Kill it if it still runs."""
        ending = self._process.end(round(min(self.used, self._seconds), 1))
        lines = list(self._lines())
        self._folder.cleanup()
        return Told(lines, ending, self.waits and ending.code is None)

    def _lines(self) -> Iterator[tuple[str, Any]]:
        for line in self._file.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):  # else it is being written, or was cut off
                yield from json.loads(line).items()
