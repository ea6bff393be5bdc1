"""Peak memory of one contender, in a process of its own: that of :mod:`hal.bench.peak_memory_process`."""

from __future__ import annotations

import json
import subprocess

import attrs

from hal.bench.bench_errors import BenchmarkError
from hal.bench.plan import Plan
from hal.config.process_keeper import ProcessKeeper
from hal.parallel.child_python import child_python


def peak(plan: Plan, batch_size: int, contender: str) -> int | None:
    """Return the peak growth of memory in bytes, from before loading weights until after a few steps.

    Args:
        plan: the plan.
        batch_size: batch size to run.
        contender: name of the contender.

    Returns:
        None if the device does not report its peak.

    Raises:
        BenchmarkError: the process failed.
    """
    side, _, mode = contender.partition(" ")
    compilers = (mode,) if side == "hal" else ()
    keys = attrs.asdict(attrs.evolve(plan, batch_sizes=(batch_size,), compilers=compilers, trace=False))
    order = json.dumps({"plan": keys, "side": side, "mode": mode})
    command = [*child_python(), "-m", "hal.bench.peak_memory_process"]
    with ProcessKeeper() as keeper:
        result = subprocess.run(command, input=order, env=keeper.environ, capture_output=True, text=True, check=False)
        if result.returncode == 0:
            keeper.ended()
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise BenchmarkError(f"the process that measures the memory of {contender} failed: {last}", "omit --memory")
    answer = json.loads(result.stdout.splitlines()[-1])
    if "problem" in answer:
        raise BenchmarkError(f"measuring the memory of {contender} failed: {answer['problem']}", answer["remedy"])
    grown: int | None = answer["bytes"]
    return grown
