"""The program of one rank: it opens a driver, joins the other ranks, and checks and times their collectives.

``python -m hal.doctor.rank_program NAME OPTIONS FOLDER RANKS SECONDS`` runs with torchrun's variables. It appends
findings to the file of its rank in FOLDER while it runs, as :mod:`hal.doctor.driver_program` does.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from hal.doctor.driver_program import REPORT, Tell
from hal.doctor.findings import Check
from hal.errors import HalError

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
SHAPE = 8, 64
SMALL_BYTES, LARGE_BYTES = 8 << 10, 64 << 20
SMALL_REPEATS, LARGE_REPEATS = 100, 5
WARM = 3
MARGIN = 0.8
"""Share of the time limit after which a rank gives up waiting, so that it can still tell of it."""


def examine(name: str, options: dict[str, Any], ranks: int, seconds: float, tell: Tell) -> None:
    """Open the driver, join the other ranks, and examine the group."""
    import hal
    from hal.config import Config, read

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
        for check, run in _checks(backend):
            tell("check", attrs.asdict(_checked(backend, check, run)))
        tell("at", "timing all_reduce")
        with backend.translating_errors():
            tell("latency_us", round(1e6 * _seconds(backend, SMALL_BYTES, SMALL_REPEATS), 1))
            tell("bandwidth_gb_per_s", round(LARGE_BYTES / _seconds(backend, LARGE_BYTES, LARGE_REPEATS) / 1e9, 2))
    tell("done", True)


def _checks(backend: Any) -> Iterator[tuple[str, Callable[[], str]]]:
    for name in COLLECTIVES:
        yield name, partial(_collective, backend, name)


def _collective(backend: Any, name: str) -> str:
    import torch

    from hal import ops
    from hal.ops.tolerance import assert_agree

    operation, group, done = ops.operation(name), backend.mesh.tensor, []
    assert operation.over_shards is not None
    for dtype in backend.limits.dtypes:
        rows = SHAPE[0] * group.size
        draws = [torch.Generator().manual_seed(each) for each in range(group.size)]
        # Every dtype represents every sum of such integers exactly.
        shards = [torch.randint(-4, 5, (rows, SHAPE[1]), generator=draw).to(dtype) for draw in draws]
        found = operation.function(shards[group.rank].to(backend.device.torch), group.name)
        done.append((dtype, found, operation.over_shards([(each, group.name) for each in shards])[group.rank]))
    for dtype, found, expected in done:  # Only now, so that a rank whose results are wrong leaves no other waiting.
        assert_agree(operation, dtype, found, expected)
    return f"{SHAPE[0] * group.size} x {SHAPE[1]}, {', '.join(str(each)[6:] for each in backend.limits.dtypes)}"


def _checked(backend: Any, name: str, run: Callable[[], str]) -> Check:
    try:
        with backend.translating_errors():
            return Check(name, "passed", run())
    except HalError as error:
        return Check(name, "failed", error.problem, error.remedy)
    except AssertionError as error:
        return Check(name, "failed", " ".join(str(error).split()), f"{REPORT}, or run its conformance tests")


def _seconds(backend: Any, nbytes: int, repeats: int) -> float:
    """Return the median duration of an all_reduce of ``nbytes``. Every rank waits for its result each time."""
    import torch

    from hal import ops

    group, dtype = backend.mesh.tensor.name, backend.limits.dtypes[0]
    x = torch.zeros(nbytes // dtype.itemsize // 1024, 1024, dtype=dtype, device=backend.device.torch)
    took = []
    for _ in range(WARM + repeats):
        start = time.perf_counter()
        ops.all_reduce(x, group)
        backend.device.synchronize()
        took.append(time.perf_counter() - start)
    return statistics.median(took[WARM:])


def main(name: str, options: str, folder: str, ranks: str, seconds: str) -> None:
    """Examine the ranks from this one, and report an error of hal's. Any other exception ends the process."""
    from hal.parallel.launch import rank

    with (Path(folder) / str(rank())).open("a", encoding="utf-8") as stream:

        def tell(key: str, value: Any) -> None:
            stream.write(json.dumps({key: value}) + "\n")
            stream.flush()

        try:
            examine(name, json.loads(options), int(ranks), float(seconds), tell)
        except HalError as error:
            tell("failed", {"problem": error.problem, "remedy": error.remedy})


if __name__ == "__main__":
    main(*sys.argv[1:])
