"""Runs a function of :mod:`helpers.rank_programs` in several ranks.

:func:`in_ranks` and :func:`on_npus` fork the ranks from a server that has imported torch and hal, which takes
milliseconds. :func:`started` and :func:`failing` start them as ``hal generate`` does, for failures, and for what a
process holds.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

from hal import ops
from hal.ops.tolerance import assert_agree
from hal.parallel.launch import Failure, run_ranks
from helpers import rank_processes

PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from helpers.ranks import main; main(*sys.argv[2:])"
LIMIT = 900.0
"""Seconds after which forked ranks are ended."""
NPUS = 4
"""The emulated NPUs of ranks."""
FUSED = {"all_gather_linear", "all_reduce_add_rms_norm", "linear_all_reduce", "linear_reduce_scatter"}
"""The fused collectives."""


def in_ranks(function: str, ranks: int, *, environ: Mapping[str, str] | None = None, **arguments: Any) -> list[Any]:
    """Return what ``function`` returns on each rank: tensors, numbers, strings, and lists and dicts of them.

    Args:
        function: the name of a function in :mod:`helpers.rank_programs`.
        ranks: the number of ranks.
        environ: see :func:`helpers.rank_processes.run`.
        arguments: the function's.
    """
    return _results(rank_processes.run(_forked, ranks, function, arguments, timeout=LIMIT, environ=environ))


def on_npus(function: str, ranks: int, **arguments: Any) -> list[Any]:
    """Return the same as :func:`in_ranks`, for functions that open an emulated NPU.

    The server has imported torch_npu, for :data:`NPUS` devices, but opened none. The ranks have this process's
    environment.
    """
    given = os.environ["EMULATED_CANN_OPTIONS"]
    devices = json.dumps({**json.loads(given), "devices": NPUS})
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "EMULATED_CANN_OPTIONS": devices}
    rank_processes.CONTEXT.set_forkserver_preload([*rank_processes.PRELOADED, *rank_processes.PRELOADED_FOR_NPUS])
    os.environ["EMULATED_CANN_OPTIONS"] = devices  # The emulated CANN reads it where it is loaded.
    try:
        forkserver.ensure_running()
    finally:
        os.environ["EMULATED_CANN_OPTIONS"] = given
    return _results(rank_processes.run(_forked, ranks, function, arguments, timeout=LIMIT, environ=environ))


def _results(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    assert rank_processes.LOST not in results, "a rank ended without a result"
    return [torch.load(io.BytesIO(result), weights_only=True) for result in results]


def _forked(rank: int, function: str, arguments: dict[str, Any]) -> bytes:
    result = io.BytesIO()
    torch.save(getattr(importlib.import_module("helpers.rank_programs"), function)(**arguments), result)
    return result.getvalue()


def started(function: str, ranks: int, folder: Path, **arguments: Any) -> list[Any]:
    """Return the same as :func:`in_ranks`, from processes that each import torch.

    Args:
        function: the name of a function in :mod:`helpers.rank_programs`.
        ranks: the number of ranks.
        folder: an empty folder.
        arguments: what JSON can hold.
    """
    failure = failing(function, ranks, folder, **arguments)
    assert failure is None, f"rank {failure.rank} failed with {failure.status}:\n{failure.text}"
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(ranks)]


def failing(function: str, ranks: int, folder: Path, **arguments: Any) -> Failure | None:
    """Return the first failure of the ranks; see :func:`started`."""
    tests = str(Path(__file__).parents[1])
    return run_ranks(["-c", PROGRAM, tests, function, str(folder), json.dumps(arguments)], ranks)


def check_fused(found: list[Any]) -> None:
    """Check the results of ``fused_collectives`` in :mod:`helpers.rank_programs`, one for each rank."""
    assert all(set(rank) == FUSED for rank in found)
    for name in FUSED:
        operation = ops.operation(name)
        assert operation.over_shards is not None
        assert all(rank[name]["of"] for rank in found), name
        for call, given in enumerate(zip(*(rank[name]["of"] for rank in found), strict=True)):
            expected = operation.over_shards([(*each, "tensor") for each in given])
            for rank, each in zip(found, expected, strict=True):
                result, dtype = rank[name]["is"][call], given[0][0].dtype
                assert_agree(operation, dtype, result, each, f"call {call}", times=len(found))  # each term is rounded


def main(function: str, folder: str, arguments: str) -> None:
    """Run one rank."""
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    programs = importlib.import_module("helpers.rank_programs")
    result = getattr(programs, function)(**json.loads(arguments))
    torch.save(result, Path(folder) / f"{os.environ['RANK']}.pt")
    sys.stdout.flush()
