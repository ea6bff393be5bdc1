"""The program of one rank: ``python -m hal.testing.ranks.rank_program FOLDER`` reads an order from stdin.

The order has the configuration of :func:`hal.open`, and what to do. The rank writes its results to FOLDER as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

PAUSE = 0.1
"""Seconds between two looks at a file."""
CHECKS, SKIPPING = "checks", "skipping"
"""What a rank can be told to do: all checks; or, all ranks but the last, to wait for a collective that one skips."""


def main(folder: str) -> None:
    """Run the order."""
    import hal

    order = json.load(sys.stdin)
    with hal.open(order["config"]) as backend:
        result = _checks(backend) if order["what"] == CHECKS else _skipping(backend, Path(folder, "0.json"))
        Path(folder, f"{backend.mesh.tensor.rank}.json").write_text(json.dumps(result), encoding="utf-8")
        if order["what"] == SKIPPING:
            os._exit(0)  # Closing a group whose collective failed may wait for the other ranks.


def _checks(backend: Any) -> dict[str, dict[str, str]]:
    """Return the outcome of each check: ``digest``, ``problem`` or ``skipped``."""
    from hal.testing.case import NotApplicable
    from hal.testing.ranks.rank_checks import checks

    found = {}
    for name, check in checks(backend):
        try:
            with backend.translating_errors():
                found[name] = {"digest": check()}
        except NotApplicable as reason:
            found[name] = {"skipped": str(reason)}
        except AssertionError as error:
            found[name] = {"problem": str(error)}
        except Exception as error:
            traceback.print_exc()
            found[name] = {"problem": f"it raised {error!r}"}
    return found


def _skipping(backend: Any, waited: Path) -> dict[str, Any]:
    """Return the error with which a collective ends that the last rank skips, and after how many seconds.

    Args:
        backend: the backend.
        waited: the file of a rank that waits, which the rank that skips the collective expects.
    """
    import torch

    from hal import ops

    group = backend.mesh.tensor
    x = torch.ones(2, 64, dtype=backend.limits.dtypes[0], device=backend.device.torch)
    ops.all_reduce(x, group.name)
    backend.device.synchronize()
    start = time.monotonic()
    if group.rank == group.size - 1:
        while not waited.exists() and time.monotonic() < start + 3 * group.timeout:
            time.sleep(PAUSE)
        return {"error": "", "seconds": 0.0}
    try:
        with backend.translating_errors():
            ops.all_reduce(x, group.name)
            backend.device.synchronize()
    except Exception as error:
        return {"error": type(error).__name__, "seconds": time.monotonic() - start, "text": str(error)}
    return {"error": "", "seconds": time.monotonic() - start}


if __name__ == "__main__":
    main(*sys.argv[1:])
