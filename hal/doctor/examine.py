"""The examination of this installation and its drivers."""

from __future__ import annotations

import getpass
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cattrs

from hal.config.child_process import Ending
from hal.device.host_capacity import other_running_threads, usable_cores
from hal.doctor import host_facts
from hal.doctor.driver_processes import Told, examine_driver, examine_ranks
from hal.doctor.findings import Check, Device, Driver, Findings, Measures
from hal.errors import ConfigError, UnknownKey
from hal.version import API_VERSION, __version__

OVER = "the time for all drivers ran out"
LONGER = "use a larger --total-timeout, or examine one driver with --backend"


def examine(
    only: str | None,
    options: Mapping[str, Any],
    seconds: float,
    total: float,
    say: Callable[[str], None] = lambda text: None,
    *,
    ranks: int = 1,
) -> Findings:
    """Examine the installation.

    Args:
        only: driver to examine, which must then be available for :attr:`Findings.ok`; None for all.
        options: options of that driver, in addition to its environment's.
        seconds: time limit per driver.
        total: time limit for everything.
        ranks: number of ranks to examine together, for each driver that works; 1 for none.

    Raises:
        DriverNotFound: no driver is called ``only``.
        ConfigError: ``options`` are invalid for it.
    """
    deadline = time.monotonic() + total
    drivers = host_facts.installed_drivers(only)
    others = other_running_threads()  # before the examination starts processes
    say("examining torch")
    torch = host_facts.torch_found(min(seconds, total))
    if torch.version:
        finished = _examine(drivers, options, seconds, deadline, say)
    else:
        finished = False
        for driver in drivers:
            driver.status, driver.hint = "unavailable", torch.remedy
            driver.reason = "not examined: torch cannot be imported"
    if ranks > 1:
        finished = _examine_ranks(drivers, ranks, options, seconds, deadline, say) and finished
    well = all(each.status != "broken" and (only is None or each.status == "works") for each in drivers)
    return without_names(
        Findings(
            hal=__version__,
            driver_api=".".join(map(str, API_VERSION)),
            python=f"{platform.python_implementation()} {platform.python_version()}",
            platform=platform.platform(),
            cores=os.cpu_count() or 1,
            usable_cores=usable_cores(),
            other_threads=others,
            torch=torch,
            variables=host_facts.variables(drivers),
            packages=host_facts.packages(drivers),
            drivers=drivers,
            ok=finished and well and any(each.status == "works" for each in drivers),
        )
    )


def _examine(
    drivers: Sequence[Driver], options: Mapping[str, Any], seconds: float, deadline: float, say: Callable[[str], None]
) -> bool:
    """Examine the drivers, one after another; return False if the time ran out."""
    for driver in drivers:
        left = deadline - time.monotonic()
        if left <= 0:
            driver.status, driver.reason, driver.hint = "unavailable", f"not examined: {OVER}", LONGER
            continue
        say(f"examining the driver {driver.name}")
        _take(driver, examine_driver(driver.name, options, min(seconds, left)), options, seconds)
    return time.monotonic() < deadline


def _examine_ranks(
    drivers: Sequence[Driver],
    ranks: int,
    options: Mapping[str, Any],
    seconds: float,
    deadline: float,
    say: Callable[[str], None],
) -> bool:
    """Examine ranks of each driver that works, one driver after the other; return False if the time ran out."""
    for driver in drivers:
        if driver.status != "works":
            continue
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        say(f"examining {ranks} ranks of the driver {driver.name}")
        examine_ranks(driver, ranks, options, min(seconds, left))
    return True


def _take(driver: Driver, told: Told, options: Mapping[str, Any], seconds: float) -> None:
    """Enter the lines that a driver's process wrote."""
    at, failed, done = "starting Python", None, False
    for key, value in told.lines:
        match key:
            case "at":
                at = value
            case "failed":
                failed = value
            case "done":
                done = True
            case _:
                _note(driver, key, value)
    kinds = {each.__name__: each for each in (ConfigError, UnknownKey)}
    if failed is not None and failed["kind"] in kinds and options:
        raise kinds[failed["kind"]](failed["problem"], failed["remedy"], key=failed["key"])
    _conclude(driver, at, failed, told.ending, done)
    if told.ending.code is None and told.ending.seconds < seconds:
        driver.hint = LONGER


def _note(driver: Driver, key: str, value: Any) -> None:
    match key:
        case "driver":
            for name, each in value.items():
                setattr(driver, name, each)
        case "probe":
            driver.status = "works" if value["available"] else "unavailable"
            driver.reason, driver.hint, driver.probe_ms = value["reason"], value["hint"], value["ms"]
        case "device":
            driver.devices.append(cattrs.structure(value, Device))
        case "check":
            driver.devices[-1].checks.append(cattrs.structure(value, Check))
        case "measures":
            driver.devices[-1].measures = cattrs.structure(value, Measures)


def _conclude(driver: Driver, at: str, failed: Mapping[str, str] | None, ending: Ending, done: bool) -> None:
    """Set the driver's status to broken, with the reason, if a check or the process failed."""
    wrong = _wrong(driver)
    if failed is not None:
        problem = failed["problem"]
        driver.reason = problem if problem.startswith(at) else f"{at}: {problem}"
        driver.hint = failed["remedy"]
    elif ending.code is None:
        driver.reason = f"{at}: {ending}"
        driver.hint = "the log shows where it hangs; increase --timeout if it is only slow"
    elif ending.code != 0 or not done:
        driver.reason, driver.hint = f"{at}: {ending}", "see the log, and report it to the driver's vendor"
    elif wrong:
        driver.reason = f"failed: {', '.join(dict.fromkeys(wrong))}"
        driver.hint = "see the checks"
    else:
        return
    driver.status, driver.log = "broken", ending.log


def _wrong(driver: Driver) -> list[str]:
    return [check.name for device in driver.devices for check in device.checks if check.outcome == "failed"]


def summary(findings: Findings) -> str:
    """Return a sentence on the overall result."""
    broken = [each.name for each in findings.drivers if each.status == "broken"]
    if broken:
        return f"broken: {', '.join(broken)}"
    if not findings.torch.version:
        return "torch cannot be imported"
    if findings.ok:
        return "everything that is available works"
    return "no examined driver can run here"


def without_names(findings: Findings) -> Findings:
    """Return the findings with the home folder replaced by ``~``, and the user's name in paths by ``USER``."""
    hidden = [(re.compile(rf"(?<![\w./-]){re.escape(home)}(?![\w.-])"), "~") for home in _home()]
    hidden += [(re.compile(rf"(?<=[/\\]){re.escape(user)}(?![\w.-])"), "USER") for user in _user()]

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            for pattern, instead in hidden:
                value = pattern.sub(instead, value)
            return value
        if isinstance(value, dict):
            return {key: clean(each) for key, each in value.items()}
        return [clean(each) for each in value] if isinstance(value, list) else value

    return cattrs.structure(clean(cattrs.unstructure(findings)), Findings)


def _home() -> list[str]:
    """Return the home folder, unless it is missing or the root folder."""
    try:
        home = Path.home()
    except RuntimeError:
        return []
    return [str(home)] if len(home.parts) > 1 else []


def _user() -> list[str]:
    """Return the user's name, unless it is unknown or root."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # as in some containers
        return []
    return [] if user == "root" else [user]
