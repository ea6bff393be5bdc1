"""A program that runs cases of the conformance suite, and writes a line of JSON before and after each.

It ends after the first case that fails, if it is told to: another process runs those that are left.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hal.config.child_process import line_writer
from hal.testing.case import Case, NotApplicable
from hal.testing.conformance import Conformance

SHORT = ("devices", "graphs", "operations")
STOPPED = 3
"""The exit status after a failure, if cases are left."""
DTYPES = ("float32", "bfloat16", "float16")


def main(wanted: dict[str, Any], file: str) -> int:
    """Run cases; return the exit status.

    Args:
        wanted: the backend, its options, the number of the first case, and which cases run.
        file: what lines are added to.
    """
    conformance = Conformance(backend=wanted["backend"], config={"options": wanted["options"]})
    cases = list(_wanted(conformance, wanted))
    with line_writer(Path(file)) as tell:
        for number, case in enumerate(cases[wanted["first"] :], wanted["first"]):
            tell({"begins": case.name})
            begin = time.perf_counter()
            status, message = _run(case)
            tell({"name": case.name, "status": status, "message": message, "seconds": time.perf_counter() - begin})
            if status == "failed" and wanted["stop_at_failure"] and number + 1 < len(cases):
                return STOPPED
    return 0


def _run(case: Case) -> tuple[str, str]:
    try:
        case.run()
    except NotApplicable as error:
        return "skipped", str(error)
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"
    return "passed", ""


def _wanted(conformance: Conformance, wanted: dict[str, Any]) -> Iterator[Case]:
    """Yield the cases: all, or the short form, in one dtype and without whole models."""
    others = {f"/{each}/" for each in DTYPES if each != wanted["dtype"]}
    for case in conformance.cases:
        if wanted["whole"] or (case.area in SHORT and not any(each in case.name for each in others)):
            yield case


if __name__ == "__main__":
    code = main(json.loads(sys.argv[1]), sys.argv[2])
    sys.stderr.flush()
    os._exit(code)  # A device that does not work may keep the process from ending.
