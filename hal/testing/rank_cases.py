"""Cases of two ranks: collectives, split layers, and a rank that skips a collective. Each rank is a process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hal.errors import CommunicationError
from hal.parallel.launch import run_ranks
from hal.testing.case import Case, NotApplicable, require
from hal.testing.rank_checks import CHECKS, SKIPPING, checks
from hal.testing.target import Target

RANKS = 2
LIMIT = 300.0
"""Seconds after which ranks are ended."""
TIMEOUT = 20
"""Seconds that ranks wait for each other, and for the one that skips a collective."""
SLACK = 2.0
"""Largest factor of TIMEOUT after which the error must have come."""


def cases(target: Target) -> Iterator[Case]:
    """Yield ``ranks/operations/...``, ``ranks/layers/...``, ``ranks/graphs/...`` and ``ranks/skipped-collective``."""
    backend = target.backend
    if backend.distributed is None:
        reason = "the driver names no backend of torch.distributed"
    elif target.driver is None:
        reason = "the hook opens the backend itself, and ranks need a driver's entry point"
    else:
        for name, _ in checks(backend):
            yield Case(f"ranks/{name}", partial(_check, target, name))
        yield Case("ranks/skipped-collective", partial(_skipped, target))
        return
    yield Case("ranks/started", partial(_not_applicable, reason))


def _not_applicable(reason: str) -> None:
    raise NotApplicable(reason)


def _check(target: Target, name: str) -> None:
    """Fail if the check failed on a rank, or if the ranks' results differ and must not."""
    results = target.cached(("ranks", CHECKS), lambda: _results(target, CHECKS))
    if not all(name in rank for rank in results):
        raise NotApplicable(
            "the processes of the ranks do not declare this operation: import it from the driver's package"
        )
    found = [rank[name] for rank in results]
    if reason := next((each["skipped"] for each in found if "skipped" in each), None):
        raise NotApplicable(reason)
    for rank, each in enumerate(found):
        require("problem" not in each, f"rank {rank} of {RANKS}: {each.get('problem')}")
    require(len({each["digest"] for each in found}) == 1, "the ranks got different bits")


def _skipped(target: Target) -> None:
    """A collective that a rank skips raises CommunicationError on the others, within a stated time."""
    waiting, _ = _results(target, SKIPPING)
    require(
        waiting["error"] == CommunicationError.__name__,
        f"rank 0 waited {waiting['seconds']:.1f} s for a rank that skips a collective, and got "
        f"{waiting['error'] or 'no error'} in place of a CommunicationError: {waiting.get('text', '')}",
    )
    require(
        waiting["seconds"] <= SLACK * TIMEOUT,
        f"rank 0 waited {waiting['seconds']:.1f} s for a rank that skips a collective; parallel.timeout is {TIMEOUT} s",
    )


def _results(target: Target, what: str) -> list[dict[str, Any]]:
    """Run an order in two ranks, and return the result of each."""
    parallel = {"tensor": RANKS, "timeout": TIMEOUT if what == SKIPPING else int(LIMIT) // 2}
    order = json.dumps({"config": {**target.rank_config(), "parallel": parallel}, "what": what})
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["-m", "hal.testing.rank_checks", folder]
        failure = run_ranks(arguments, RANKS, stdin=order.encode(), seconds=LIMIT)
        files = [Path(folder, f"{rank}.json") for rank in range(RANKS)]
        if all(file.exists() for file in files):
            return [json.loads(file.read_text(encoding="utf-8")) for file in files]
    assert failure is not None
    how = f"did not end within {LIMIT:g} s" if failure.status is None else f"ended with status {failure.status}"
    problem = failure.ending[0] if failure.ending else f"rank {failure.rank} of {RANKS} {how}"
    raise AssertionError(f"{problem}:\n{failure.text or 'rank 0 wrote to stderr'}")
