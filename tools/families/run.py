"""``make families``: try causal language models of transformers, and write facts about them and a page from the facts.

    python tools/families/run.py [--checks eager,graph,ranks,inductor] [--minutes N] [MODEL_TYPE...]
    python tools/families/run.py --page

The first adds to docs/reference/families.json. Without types, it tries what the file does not have, so that a run can
go on later; types that are named are tried again. The second writes families.md beside the file.

Each check of a family has its own process. The checks ``npu`` and ``beside`` need a Python with torch_npu, in a call
without the others, because an emulated CANN stays in a process.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import resource
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from page import kept, page, written

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

FACTS = Path(__file__).parents[2] / "docs" / "reference" / "families.json"
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
    parser.add_argument("--facts", type=Path, default=FACTS)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--checks", default="eager")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("kinds", nargs="*")
    given = parser.parse_args()
    facts: dict[str, dict[str, Any]] = json.loads(given.facts.read_text()) if given.facts.exists() else {}
    if given.page:
        given.facts.with_suffix(".md").write_text(page(facts), encoding="utf-8")
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
            runs = check == "eager" or known["native" if check == "beside" else "eager"] in (True, "yes")
            if (CHECKS[check][0] in known and not given.kinds) or not runs:
                continue
            if time.monotonic() > end:
                return
            for name in CHECKS[check]:
                for fact in (name, f"{name} reason", f"{name} difference"):
                    known.pop(fact, None)
            found = checked(kind, check)
            known |= kept(kind, found, found.get("architecture") or known["architecture"])
            known["version"] = importlib.metadata.version("transformers")
            sys.stdout.write(f"{kind} {check} { {name: known.get(name) for name in CHECKS[check]} }\n")
            sys.stdout.flush()
            given.facts.write_text(written(facts), encoding="utf-8")


if __name__ == "__main__":
    main()
