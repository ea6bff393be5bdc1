"""The program that examines one driver, or one of several ranks of it, in a separate process.

``python -m hal.doctor.driver_program NAME OPTIONS FILE LIMIT`` appends findings to FILE while it runs, one JSON object
with one key per line. The parent process can then tell how far it came if it does not return: ``at`` names the stage
that begins, and ``done`` marks the end. With a number of ranks as the last argument, it runs with torchrun's variables,
and the name of the file ends with the rank.
"""

from __future__ import annotations

import faulthandler
import json
import os
import reprlib
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import psutil

from hal.config.child_process import line_writer
from hal.doctor.findings import Device
from hal.errors import HalError

Tell = Callable[[str, Any], None]
REPORT = "report it to the driver's vendor"
EARLIEST = 0.02
"""The least seconds after which Python writes its stack."""
MARGIN = 0.8
"""Share of the time limit after which a rank gives up waiting, so that it can still tell of it."""


def examine(name: str, options: Mapping[str, Any], tell: Tell) -> None:
    """Load, probe and open the driver ``name``, and examine its devices.

    ``tell`` writes a key and its value to the file.
    """
    import hal
    from hal.config import environment_options
    from hal.drivers.driver import Probe
    from hal.drivers.registry import load_driver
    from hal.errors import DriverIncompatible

    tell("at", "importing the driver")
    driver = load_driver(name)
    tell(
        "driver",
        {
            "api_version": ".".join(map(str, driver.api_version)),
            "priority": driver.priority,
            "requires": list(map(str, driver.requires)),
            "variables": list(map(str, driver.variables)),
        },
    )
    options = {**environment_options(name), **options}
    tell("at", "probing")
    start = time.perf_counter()
    probe: Any = driver.probe_for(options)
    took = time.perf_counter() - start
    if not isinstance(probe, Probe):
        raise DriverIncompatible(f"the probe returned {probe!r}, not a hal.vendor.Probe", REPORT)
    tell("probe", {**attrs.asdict(probe), "ms": round(took * 1e3, 1)})
    if not probe.available:
        return
    tell("at", "opening the driver")
    backend = hal.open({"backend": name, "options": options})
    places: Any = driver.devices(options)
    if not (isinstance(places, Sequence) and places and all(isinstance(each, Mapping) for each in places)):
        raise DriverIncompatible(
            f"the driver can be opened, but its `devices` returned {reprlib.repr(places)}, not a list of options",
            REPORT,
        )
    for number, place in enumerate(places):
        if number or place != options:
            tell("at", f"opening the driver with the options {dict(place)}")
            backend = hal.open({"backend": name, "options": place})
        tell("device", attrs.asdict(Device(str(backend.device.torch), backend.device.name)))
        examine_device(backend, tell)


def examine_device(backend: Any, tell: Tell) -> None:
    """Check and measure the device of ``backend``, which must be active."""
    from hal.doctor.checks import checked, checks, measures

    for name, check in checks(backend):
        tell("at", f"checking {name} on {backend.device.torch}")
        tell("check", attrs.asdict(checked(backend, name, check)))
    tell("at", f"measuring {backend.device.torch}")
    with backend.translating_errors():
        tell("measures", attrs.asdict(measures(backend)))


def _age() -> float:
    """Return the seconds since this process was started; on a busy machine Python itself takes some to start."""
    return time.time() - float(psutil.Process().create_time())


def examine_ranks(name: str, options: Mapping[str, Any], ranks: int, seconds: float, tell: Tell) -> None:
    """Open the driver in one of several ranks, join the others, and check and time their collectives."""
    import hal
    from hal.config import Config, read
    from hal.doctor.checks import checked, collective_checks, collective_speed

    tell("at", "opening the driver")
    with hal.open({"backend": name, "options": options}) as backend:
        tell("device", str(backend.device.torch))
        if backend.distributed is None:
            tell("skipped", f"the driver {name} names no backend of torch.distributed")
            return
        tell("at", f"joining the {ranks - 1} other ranks")
        parallel = {"tensor": ranks, "timeout": max(1, int(MARGIN * seconds))}
        backend.configure(read(Config, {"backend": name, "options": options, "parallel": parallel}))
        tell("at", "checking the collectives")
        for check, run in collective_checks(backend):
            tell("check", attrs.asdict(checked(backend, check, run)))
        tell("at", "timing all_reduce")
        for key, value in collective_speed(backend).items():
            tell(key, value)


def main(name: str, options: str, file: str, limit: str, ranks: str = "1") -> None:
    """Examine the driver, and report every exception."""
    rank = os.environ["RANK"] if ranks != "1" else ""
    with line_writer(Path(file + rank)) as write:

        def tell(key: str, value: Any) -> None:
            write({key: value})

        try:
            if ranks != "1":
                examine_ranks(name, json.loads(options), int(ranks), float(limit), tell)
            else:
                # Python writes its stack to stderr before the process is killed for exceeding its limit.
                faulthandler.dump_traceback_later(max(0.9 * float(limit) - _age(), EARLIEST))
                examine(name, json.loads(options), tell)
        except HalError as error:
            if error.__cause__ is not None:  # the driver's exception
                traceback.print_exc()
            kind = type(error).__name__
            tell("failed", {"kind": kind, "problem": error.problem, "remedy": error.remedy, "key": error.key})
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            tell("failed", {"kind": type(error).__name__, "problem": f"it raised {error!r}", "remedy": REPORT})
        else:
            tell("at", "ending the process")
            tell("done", True)


if __name__ == "__main__":
    main(*sys.argv[1:])
