"""The processes that examine drivers: each driver in one, in parallel, and several ranks of a driver together.

Checks run in parallel, measurements do not: a process that is ready to measure waits until no other one checks, and
then runs alone until it ends. What ranks tell is put together.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import cattrs

from hal.config.child_process import LOG_LINES, ChildProcess, Ending, read_lines
from hal.config.process_keeper import ProcessKeeper
from hal.doctor.findings import Check, Driver, Ranks
from hal.doctor.host_facts import ISOLATED

PROGRAM = ("-m", "hal.doctor.driver_program")
MISSING = "check that as many devices are visible, and that --timeout is long enough to open them"
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
        arguments = [*PROGRAM, name, json.dumps(options), str(self._file), str(seconds)]
        self._process = ChildProcess([*ISOLATED, *arguments], self._keeper)
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
        for entry in read_lines(self._file):
            yield from entry.items()


def examine_ranks(driver: Driver, number: int, options: Mapping[str, Any], seconds: float) -> None:
    """Start ``number`` ranks of a driver, and enter the findings; a driver whose ranks fail is broken.

    Args:
        driver: a driver that works on one device.
        options: options in addition to its environment's.
        seconds: time limit for all ranks together.
    """
    from hal.parallel.launch import run_ranks  # imports torch, which works: the driver does

    with ProcessKeeper() as keeper:
        file = str(keeper.folder / "findings")
        arguments = [*PROGRAM, driver.name, json.dumps(dict(options)), file, str(seconds), str(number)]
        failure = run_ranks(arguments, number, seconds=seconds)
        keeper.ended()
        told = [_told(Path(f"{file}{rank}")) for rank in range(number)]
    driver.ranks = found = _together(told)
    if failure is not None and failure.text:
        driver.log = failure.text.splitlines()[-LOG_LINES:]
    if failure is not None and failure.ending is not None:
        problem, remedy = failure.ending
        found.checks.append(Check("ranks", "failed", problem, remedy))
    elif found.skipped or all(each.get("done") for each in told):
        wrong = [each.name for each in found.checks if each.outcome == "failed"]
        problem, remedy = (f"failed: {', '.join(wrong)}", "see the checks") if wrong else ("", "")
    else:
        problem, remedy = _failure(told, seconds)
        found.checks.append(Check("ranks", "failed", problem, remedy))
    if problem:
        driver.status, driver.reason, driver.hint = "broken", f"{number} ranks: {problem}", remedy


def _told(file: Path) -> dict[str, Any]:
    """Return what a rank wrote last for each key, and the list of its checks."""
    found: dict[str, Any] = {"checks": []}
    for entry in read_lines(file):
        for key, value in entry.items():
            if key == "check":
                found["checks"].append(cattrs.structure(value, Check))
            else:
                found[key] = value
    return found


def _together(told: Sequence[Mapping[str, Any]]) -> Ranks:
    """Return the findings of all ranks. A check that fails on any rank fails."""
    checks = []
    for each in zip(*(rank["checks"] for rank in told), strict=False):
        failed = [(rank, check) for rank, check in enumerate(each) if check.outcome == "failed"]
        if failed:
            rank, check = failed[0]
            checks.append(Check(check.name, "failed", f"rank {rank}: {check.detail}", check.remedy))
        else:
            checks.append(each[0])
    first = told[0]
    return Ranks(
        number=len(told),
        devices=[rank.get("device", "") for rank in told],
        skipped=next((rank["skipped"] for rank in told if "skipped" in rank), ""),
        checks=checks,
        latency_us=first.get("latency_us"),
        bandwidth_gb_per_s=first.get("bandwidth_gb_per_s"),
    )


def _failure(told: Sequence[Mapping[str, Any]], seconds: float) -> tuple[str, str]:
    """Return what went wrong first, and what to do. Ranks that did not come are named before those that waited."""
    joining = [rank for rank, each in enumerate(told) if str(each.get("at", "")).startswith("joining")]
    absent = [rank for rank, each in enumerate(told) if "at" not in each or each["at"] == "opening the driver"]
    errors = [(rank, each["failed"]) for rank, each in enumerate(told) if "failed" in each and rank in absent]
    errors += [(rank, each["failed"]) for rank, each in enumerate(told) if "failed" in each and rank not in absent]
    if errors and (errors[0][0] in absent or not absent):
        rank, error = errors[0]
        return f"rank {rank}, {told[rank].get('at', 'starting Python')}: {error['problem']}", error["remedy"]
    late = absent or [rank for rank, each in enumerate(told) if not each.get("done") and rank not in joining]
    which = f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}" if late else "no rank"
    where = "; ".join(f"rank {rank} was {told[rank].get('at', 'starting Python')}" for rank in late)
    return f"{which} did not come within {seconds:g} s ({where})" if late else "the ranks did not meet", MISSING
