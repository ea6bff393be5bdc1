"""The processes that examine drivers: one for each driver, and several ranks of a driver together.

Drivers are examined one after another, so that no process disturbs what another measures. What ranks tell is put
together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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


@attrs.frozen
class Told:
    """The output of a process.

    Attributes:
        lines: keys and values, in order.
    """

    lines: list[tuple[str, Any]]
    ending: Ending


def examine_driver(name: str, options: Mapping[str, Any], seconds: float) -> Told:
    """Examine a driver in a separate process, and kill it after ``seconds``.

    Args:
        options: options in addition to its environment's.
    """
    with ProcessKeeper() as keeper:
        file = keeper.folder / "findings"
        arguments = [*PROGRAM, name, json.dumps(dict(options)), str(file), str(seconds)]
        process = ChildProcess([*ISOLATED, *arguments], keeper)
        process.wait(seconds)
        ending = process.end(round(seconds, 1))
        if ending.code == 0:
            keeper.ended()
        return Told([each for entry in read_lines(file) for each in entry.items()], ending)


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
