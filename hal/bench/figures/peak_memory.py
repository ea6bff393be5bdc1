"""Peak memory of one contender, in a process of its own: that of :mod:`hal.bench.peak_memory_process`."""

from __future__ import annotations

import json
import subprocess
import sys

import attrs

from hal.bench.bench_errors import BenchmarkError
from hal.bench.plan import Plan


def peak(plan: Plan, batch_size: int, contender: str) -> int | None:
    """Bytes that memory grew by at most, from before the weights were loaded to after a few steps.

    Args:
        plan: the plan.
        batch_size: the one to run.
        contender: its name.

    Returns:
        None if the device keeps no such figure.

    Raises:
        BenchmarkError: the process failed.
    """
    side, _, mode = contender.partition(" ")
    compilers = (mode,) if side == "hal" else ()
    keys = attrs.asdict(attrs.evolve(plan, batch_sizes=(batch_size,), compilers=compilers, trace=False))
    order = json.dumps({"plan": keys, "side": side, "mode": mode})
    command = [sys.executable, "-m", "hal.bench.peak_memory_process"]
    result = subprocess.run(command, input=order, capture_output=True, text=True, check=False)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise BenchmarkError(
            f"the process that measures the memory of {contender} failed: {last}", "leave out --memory"
        )
    answer = json.loads(result.stdout.splitlines()[-1])
    if "problem" in answer:
        raise BenchmarkError(f"measuring the memory of {contender} failed: {answer['problem']}", answer["remedy"])
    grown: int | None = answer["bytes"]
    return grown
