"""``make families``: try every causal language model of transformers, and write what came out as a page.

    python tests/families/run.py --facts build/families.json [--checks eager,graph,ranks,npu] [--minutes N] [MODEL_TYPE]
    python tests/families/run.py --facts build/families.json --page docs/reference/families.md

The second writes launches.md beside that page, too.

Facts are kept between calls, so that a run can go on later. Each check of a family has a process of its own. The check
``npu`` needs a Python with torch_npu, and not in the same call as the others: an emulated CANN stays in a process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

CHECKS = {
    "eager": ("eager",),
    "graph": ("graph", "piecewise"),
    "inductor": ("inductor",),
    "ranks": ("ranks",),
    "npu": ("npu", "launches"),
    "beside": ("own", "transformers"),
}
"""The facts that each check finds, the first of which it always does."""
EMULATED = frozenset({"npu", "beside"})
"""Checks on an emulated CANN."""
LIMIT = 600
"""The longest time of a check, in seconds."""
MOST_BYTES = 14 << 30
"""The most address space of a check without an emulated CANN, which reserves much more."""


def checked(kind: str, check: str) -> dict[str, Any]:
    """Return what a check finds, run in a fork of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        if check not in EMULATED:
            resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        with os.fdopen(writing, "w") as output:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process

            def tell(**facts: Any) -> None:
                print(json.dumps(facts), file=output, flush=True)

            try:
                _function(check)(kind, tell)
            except BaseException as error:
                import checks

                first = CHECKS[check][0]
                tell(**{first: "no", f"{first} reason": checks._reason(error)})
        os._exit(0)
    os.close(writing)
    found, deadline, text = {}, time.monotonic() + LIMIT, ""
    while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (piece := os.read(reading, 1 << 16).decode()):
            break
        text += piece
    else:
        os.kill(child, 9)
        found[CHECKS[check][0]] = "late"
    os.close(reading)
    os.waitpid(child, 0)
    for line in text.splitlines():
        found |= json.loads(line)
    if CHECKS[check][0] not in found:
        found |= {CHECKS[check][0]: "no", f"{CHECKS[check][0]} reason": "the process ended"}
    return found


def _function(check: str) -> Callable[..., None]:
    import checks

    if check in ("eager", "graph", "inductor"):
        return lambda kind, tell: checks.on_cpu(kind, CHECKS[check], tell)
    return {"ranks": checks.on_two_ranks, "npu": checks.on_npu, "beside": checks.beside_on_npu}[check]


def main() -> None:
    """Run the checks that have no facts yet, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--facts", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--checks", default="eager")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("kinds", nargs="*")
    given = parser.parse_args()
    facts: dict[str, dict[str, Any]] = json.loads(given.facts.read_text()) if given.facts.exists() else {}
    if given.page:
        from page import launches_of, page_of

        given.page.write_text(page_of(facts), encoding="utf-8")
        (given.page.parent / "launches.md").write_text(launches_of(facts), encoding="utf-8")
        return
    import hal  # noqa: F401 - so that each fork has it

    if not EMULATED & {*given.checks.split(",")}:
        import checks  # noqa: F401 - which imports transformers, before which those must start an emulated CANN
        import transformers.modeling_utils  # noqa: F401

    listed = given.kinds or list(facts)
    if "eager" in given.checks and not given.kinds:
        from helpers.transformers_families import kinds

        listed = list(kinds())
    end = time.monotonic() + 60 * given.minutes
    for check in given.checks.split(","):
        for kind in listed:
            known = facts.setdefault(kind, {})
            runs = check == "eager" or (known.get("eager") == "yes" and (check != "beside" or known["native"]))
            if (CHECKS[check][0] in known and not given.kinds) or not runs:
                continue
            if time.monotonic() > end:
                return
            for name in CHECKS[check]:
                known.pop(f"{name} reason", None)
            known |= checked(kind, check)
            sys.stdout.write(f"{kind} {check} { {name: known.get(name) for name in CHECKS[check]} }\n")
            sys.stdout.flush()
            given.facts.parent.mkdir(parents=True, exist_ok=True)
            given.facts.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
