"""Peak memory of one contender, in a process of its own: that of :mod:`hal.bench.peak_memory_process`."""

from __future__ import annotations

import json
import tempfile

import attrs

from hal.bench.plan import BenchmarkError, Plan
from hal.config.child_process import ChildProcess
from hal.config.process_keeper import ProcessKeeper


def peak(plan: Plan, batch_size: int, contender: str) -> int | None:
    """Return the peak growth of memory in bytes, from before loading weights until after a few steps.

    Returns:
        None if the device does not report its peak.

    Raises:
        BenchmarkError: the process failed.
    """
    side, _, mode = contender.partition(" ")
    compilers = (mode,) if side == "hal" else ()
    keys = attrs.asdict(attrs.evolve(plan, batch_sizes=(batch_size,), compilers=compilers, trace=False))
    order = json.dumps({"plan": keys, "side": side, "mode": mode})
    with ProcessKeeper() as keeper, tempfile.TemporaryFile() as output:
        arguments = ["-m", "hal.bench.peak_memory_process"]
        process = ChildProcess(arguments, keeper, stdin=order.encode(), stdout=output, in_foreground=True)
        if process.wait():
            last = (process.stderr().strip().splitlines() or ["no output"])[-1]
            raise BenchmarkError(f"the process that measures the memory of {contender} failed: {last}", "omit --memory")
        keeper.ended()
        output.seek(0)
        answer = json.loads(output.read().splitlines()[-1])
    if "problem" in answer:
        raise BenchmarkError(f"measuring the memory of {contender} failed: {answer['problem']}", answer["remedy"])
    grown: int | None = answer["bytes"]
    return grown
