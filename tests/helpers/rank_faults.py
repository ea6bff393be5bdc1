"""A job of two ranks with a fault of rank 1 at one point. Each rank writes what it sees; see :mod:`helpers.ranks`.

A fault uses no access to hal's internals: it is a signal, an exception, a delay, or a call that differs.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hal

VICTIM = 1
STEPS = 20
"""Tokens to generate."""
STRUCK_AT = 3
"""The number of tokens before the fault."""
SLOW = 1.5
"""The number of timeouts by which a late rank is late."""
DIFFERENT = (("capture", "shapes"), ("capture", "skips"))
"""Faults that are only seen where ranks meet."""


class Strike:
    """The fault of this rank, which happens at most once.

    Args:
        fault: ``killed``, ``raises``, ``late``, ``skips``, ``shapes`` or ``interrupted``; see :meth:`now`.
        timeout: the ranks' limit for a collective, in seconds.
        into: the folder for the time of the fault.
    """

    def __init__(self, fault: str, timeout: int, into: Path) -> None:
        self.fault, self.timeout = fault, timeout
        self._time = into / "time.txt"

    def meet(self, on: dict[str, Any]) -> None:
        """Open the backend alone, which may take long, and wait until both ranks have done so."""
        hal.open(on).close()
        (self._time.parent / f"{os.environ['RANK']}.opened").touch()
        while len(list(self._time.parent.glob("*.opened"))) < 2:
            time.sleep(0.01)

    def at(self) -> None:
        """Write down that the fault happens now."""
        self._time.write_text(str(time.monotonic()))

    def now(self) -> None:
        """Let the fault happen: die, raise, or wait."""
        if self._time.exists():
            return
        self.at()
        match self.fault:
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raises":
                raise ValueError("the fault of rank 1")
            case "late":
                time.sleep(SLOW * self.timeout)

    def from_outside(self, delay: float) -> None:
        """Let the fault happen after ``delay`` seconds, whatever this process does then: die, or freeze for a time."""
        if self.fault == "late":
            pid, seconds = os.getpid(), SLOW * self.timeout
            self._time.write_text(str(time.monotonic() + delay))
            script = f"sleep {delay}; kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}"
            subprocess.Popen(["sh", "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            return
        threading.Timer(delay, self._signal).start()

    def _signal(self) -> None:
        self.at()
        os.kill(os.getpid(), signal.SIGKILL if self.fault == "killed" else signal.SIGINT)


class _BetweenCaptures(logging.Handler):
    """Calls a function at the first message that the runner logs about its captures, after the warm-up."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self.call = call

    def emit(self, record: logging.LogRecord) -> None:
        self.call()


def faulty(fault: str, point: str, into: str, **job: Any) -> None:
    """Run :func:`_job` with a fault of rank 1, and write the type, time and text of this rank's error.

    Args:
        fault: see :class:`Strike`.
        point: ``joining``, ``loading``, ``capture``, ``replay`` or ``sampling``.
        into: a folder.
        job: further arguments of :func:`_job`.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the program that ends the ranks, so that each error is seen
    rank, strike = int(os.environ["RANK"]), Strike(fault, job["timeout"], Path(into))
    found: dict[str, Any] = {"error": None}
    try:
        _job(fault if rank == VICTIM else "", point, strike, **job)
    except BaseException as error:
        found = {"error": type(error).__name__, "text": str(error)}
        if rank == VICTIM and (point, fault) in DIFFERENT:
            strike.at()
        raise
    finally:
        found["time"] = time.monotonic()
        Path(into, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def _job(
    fault: str, point: str, strike: Strike, *, checkpoint: str, timeout: int, on: dict[str, Any], compiler: str
) -> None:
    """Open, load, capture and generate.

    Args:
        fault: the fault of this rank; empty for none.
        point: when it happens.
        strike: makes it happen.
        checkpoint: the folder.
        timeout: ``parallel.timeout``.
        on: the backend, its options and the dtype.
        compiler: the compiler.
    """
    here = point if fault else ""
    if point == "joining":
        strike.meet(on)
    if here == "joining":
        strike.now()
    sizes = [2] if here == "capture" and fault == "shapes" else [1]
    # Without captures, rank 0 comes to its first collective at once.
    compiler = "eager" if point == "loading" or (here == "capture" and fault == "skips") else compiler
    config = {
        **on,
        "parallel": {"tensor": 2, "timeout": timeout},
        "compilation": {"compiler": compiler, "capture_sizes": sizes},
    }
    with hal.open(config) as backend:
        loaded = (lambda done, total: strike.now() if 2 * done > total else None) if here == "loading" else None
        model = hal.load_model(checkpoint, backend, progress=loaded)
        if here == "capture" and fault not in ("shapes", "skips"):
            log = logging.getLogger("hal.execution")
            log.setLevel(logging.INFO)
            log.addHandler(_BetweenCaptures(strike.now))
        with hal.Runner(model, backend) as runner:
            _generate(runner, fault, here, strike)


def _generate(runner: hal.Runner, fault: str, here: str, strike: Strike) -> None:
    forever = here == "replay" and fault in ("killed", "interrupted", "late")
    for _ in range(1000 if _endless(strike.fault) else 1):
        for step, _token in enumerate(hal.generate(runner, [[5, 6, 7]], hal.SamplingParams(max_new_tokens=STEPS))):
            if step != STRUCK_AT or not here:
                continue
            if here == "sampling":
                strike.now()
            elif forever:
                strike.from_outside(0.05)
                here = ""
            elif here == "replay" and fault == "skips":
                strike.at()
                return
            elif here == "replay" and fault == "shapes":
                strike.at()
                blocks = [runner.blocks.take(1) or [], runner.blocks.take(1) or []]
                runner.step(runner.batch([[5], [6]], blocks))


def _endless(fault: str) -> bool:
    """Return whether ranks go on to generate until the fault happens, which comes from outside."""
    return fault in ("killed", "interrupted", "late")


def left_behind(mark: str) -> list[str]:
    """Return the command lines of the processes that have ``mark`` in their environment."""
    found = []
    for each in Path("/proc").iterdir():
        if not each.name.isdigit() or int(each.name) == os.getpid():
            continue
        try:
            if mark.encode() in (each / "environ").read_bytes():
                found.append((each / "cmdline").read_text().replace("\0", " "))
        except OSError:  # It has ended, or belongs to another user.
            continue
    return found


if __name__ == "__main__":
    sys.stdout.write("\n".join(left_behind(sys.argv[1])))
