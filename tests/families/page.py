"""The page of the families, from the facts about them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

HEAD = """\
# Families

Every causal language model of transformers {version}, run by hal [with transformers'
code](../how-to/run-other-models.md) from a small random checkpoint: its logits in prompts, chunks, a shared prefix and
eight decode steps are compared with transformers' own in float32 on a CPU. `make families` tries them again and writes
this page; tests of hal run some.

Of {total} model types, {runs} run and give transformers' logits{wrong}; the others are refused, for the reasons
[below](#refused).

- *hal* marks the architectures for which hal has a model too, which `auto` takes.
- *2 ranks*: two CPU ranks, in `graph`. *NPU*: the emulated NPU in bfloat16, in `graph`; *launches* are those of one
  more layer in a decode step there.
- *difference*: the power of ten that no difference of logits on the CPU exceeds, in parts of the largest logit.
- An empty cell was not tried: {graph} types were tried in `graph`, {ranks} with 2 ranks, {npu} on the NPU.

## Run

| model_type | architecture | hal | eager | graph | piecewise | inductor | 2 ranks | NPU | launches | difference |
|---|---|---|---|---|---|---|---|---|---|---|
"""
COLUMNS = ("eager", "graph", "piecewise", "inductor", "ranks", "npu", "launches")


def page_of(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of the page."""
    import transformers

    tried = {kind: each for kind, each in sorted(facts.items()) if "eager" in each}
    run = {kind: each for kind, each in tried.items() if each["eager"] == "yes"}
    wrong = [kind for kind, each in tried.items() if "wrong" in each.values()]
    text = HEAD.format(
        version=transformers.__version__,
        total=len(tried),
        **{name: sum(name in each for each in run.values()) for name in ("graph", "ranks", "npu")},
        runs=len(run),
        wrong=f"; {len(wrong)} give others somewhere ({', '.join(wrong)})" if wrong else "",
    )
    for kind, each in run.items():
        worst = _power(max(value for name, value in each.items() if name.endswith("difference") and name[:3] != "npu"))
        cells = [kind, f"`{each['architecture']}`", "yes" if each["native"] else ""]
        text += f"| {' | '.join([*cells, *(str(each.get(name, '')) for name in COLUMNS), worst])} |\n"
    modes: dict[str, list[str]] = {}
    for kind, each in run.items():
        for name in COLUMNS:
            if each.get(name) == "no" and (reason := each.get(f"{name} reason")):
                modes.setdefault(f"{name}: {_reason(reason, each)}", []).append(kind)
    if modes:
        text += "\n## Refused in one mode\n\n" + _grouped(modes)
    refused: dict[str, list[str]] = {}
    for kind, each in tried.items():
        if kind not in run:
            refused.setdefault(_reason(each.get("eager reason", each["eager"]), each), []).append(kind)
    return text + "\n## Refused\n\n" + _grouped(refused)


def _grouped(kinds: Mapping[str, list[str]]) -> str:
    rows = sorted(kinds.items(), key=lambda each: (-len(each[1]), each[0]))
    lines = "".join(f"| {reason} | {', '.join(each)} |\n" for reason, each in rows)
    return f"| reason | model_type |\n|---|---|\n{lines}"


def _reason(text: str, facts: Mapping[str, Any]) -> str:
    """Return a refusal without the name of the class, and without what depends on its sizes."""
    if "architecture" not in facts:
        return "there is no small random model of it: the rules of tests/helpers/transformers_families.py do not fit"
    name = str(facts["architecture"])
    text = text.removeprefix(f"{name}: ").removeprefix(f"{name} of transformers ")
    text = re.sub(r"/tmp/\S+", "the checkpoint", text)
    text = re.sub(r": they differ by .* of the largest", "", text)
    return text.replace(name, "the class").replace("|", "\\|").replace("<", "\\<")


def _power(value: float) -> str:
    """Return the power of ten that a difference does not exceed, because its digits depend on the machine."""
    return f"1e{math.ceil(math.log10(max(value, 1e-7)))}"
