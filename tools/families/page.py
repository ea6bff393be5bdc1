"""The page about families, from the facts about them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

HEAD = """\
# Families

Every causal language model of transformers {version}, run by hal [with transformers'
code](../how-to/run-other-models.md) from a small random checkpoint: its logits in prompts, chunks, a shared prefix and
eight decode steps are compared with transformers' own in float32 on a CPU. `make families` tries them, and writes
`families.json` and this page; tests of hal run some.

Of {total} model types, {runs} run and give transformers' logits in `eager`{wrong}. Of these,
{modes}.
The others are refused, for the reasons [below](#refused). {stateful} of those keep another state than keys and values;
of the {keyed} types that do not, {runs} run. No difference of logits on the CPU exceeds {worst} of the largest logit.

Reasons of models that cannot be made small, or that fail without one, are from the code of transformers.
`families.json` has the architecture, the differences and the launches of each type.

## Run

hal has a model, too, of the architectures in bold. `auto` takes that one.

"""
STATE = "keeps another state than keys and values"
UNTRIED = {
    **dict.fromkeys(
        (
            *("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "recurrent_gemma", "zamba"),
            *("inkling2_text", "inkling2_loop_text", "qwen4_exp", "qwen4_exp_text", "dots3_note", "rwkv", "xlstm"),
        ),
        f"a layer of transformers' model {STATE}",
    ),
    "minimax": f"a layer of transformers' model {STATE}",
    "blt": "it predicts bytes by patches, whose number depends on the text",
    "dory": "it runs its layers several times, and the later passes write other caches than the first",
    "gemma3n": "its vision tower needs the package timm; gemma3n_text runs",
    "gemma4_assistant": "it drafts from the keys and values of another model",
    "gemma4_unified_assistant": "it drafts from the keys and values of another model",
    "gemma4_unified": "it needs the types of its tokens (text, image, audio); gemma4_unified_text runs",
    "musicgen": "it predicts several tokens a step, one of each codebook",
    "musicgen_melody": "it predicts several tokens a step, one of each codebook",
    "reformer": "it chooses the keys of a query by hashing, or attends within chunks",
    "roformer": "it rotates by positions that it counts over the whole sequence",
    "xlnet": "it attends by relative positions, with biases that depend on the query",
}
"""Why types are refused of which there is no small model, or whose error does not say it: from their code."""
COLUMNS = ("eager", "graph", "piecewise", "inductor", "ranks", "npu", "launches")


def kept(kind: str, found: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return facts without what depends on the machine or on a checkpoint's sizes.

    Differences become the power of ten that they do not exceed, and reasons lose the name of the class and of folders.
    """
    facts = dict(found)
    for name, value in found.items():
        if name.endswith(" difference"):
            facts[name] = float(f"1e{math.ceil(math.log10(max(value, 1e-7)))}")
        elif name.endswith(" reason"):
            text = UNTRIED.get(kind, value) if name == "eager reason" else value
            text = text.removeprefix(f"{architecture}: ").removeprefix(f"{architecture} of transformers ")
            text = re.sub(r"/tmp/\S+", "the checkpoint", text)
            text = re.sub(r": they differ by .* of the largest", "", text)
            facts[name] = text.replace(architecture, "the class")
    return facts


def written(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the JSON of the facts, one type a line."""
    lines = ",\n".join(f"{json.dumps(kind)}: {json.dumps(each)}" for kind, each in sorted(facts.items()))
    return f"{{\n{lines}\n}}\n"


def page(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of the page."""
    tried = {kind: each for kind, each in sorted(facts.items()) if "eager" in each}
    run = {kind: each for kind, each in tried.items() if each["eager"] == "yes"}
    wrong = [kind for kind, each in tried.items() if "wrong" in each.values()]
    stateful = sum(STATE in each.get("eager reason", "") for each in tried.values() if each["eager"] != "yes")
    worst = max(
        value
        for each in run.values()
        for name, value in each.items()
        if name.endswith(" difference") and not name.startswith("npu")
    )
    names = {"graph": "in `graph`", "piecewise": "in `piecewise`", "inductor": "in `inductor`"}
    names |= {"ranks": "split between 2 ranks", "npu": "on the emulated NPU in bfloat16"}
    counts = {told: sum(each.get(name) == "yes" for each in run.values()) for name, told in names.items()}
    text = HEAD.format(
        stateful=stateful,
        keyed=len(tried) - stateful,
        version=", ".join(sorted({each["version"] for each in tried.values()})),
        total=len(tried),
        modes=", ".join(f"{count} run {told}" for told, count in counts.items()),
        worst=f"{worst:.0e}".replace("e-0", "e-"),
        runs=len(run),
        wrong=f"; {len(wrong)} give others somewhere ({', '.join(wrong)})" if wrong else "",
    )
    text += ", ".join(f"**{kind}**" if each["native"] else kind for kind, each in run.items()) + "\n"
    modes: dict[str, list[str]] = {}
    for kind, each in run.items():
        for name in COLUMNS:
            if each.get(name) == "no" and (reason := each.get(f"{name} reason")):
                modes.setdefault(f"{name}: {reason}", []).append(kind)
    if modes:
        text += "\n## Refused in one mode\n\n" + _grouped(modes)
    refused: dict[str, list[str]] = {}
    for kind, each in tried.items():
        if kind not in run:
            refused.setdefault(each.get("eager reason", each["eager"]), []).append(kind)
    return text + "\n## Refused\n\n" + _grouped(refused) + _launches(facts)


LAUNCHES = """
## Launches of a decode layer

The launches that one more layer adds to a decode step of one sequence, on the emulated NPU in bfloat16: of transformers
alone, of hal with transformers' code in `graph`, and of hal's own model. hal does not run transformers' code of types
without a number there. [Another page](npu-launches.md#latent-and-sparse-attention) has layers with the published sizes.

| model_type | transformers, eager | hal, transformers' code | hal's own model |
|---|---|---|---|
"""


def _launches(facts: Mapping[str, Mapping[str, Any]]) -> str:
    text = LAUNCHES
    for kind, each in sorted(facts.items()):
        if isinstance(each.get("own"), int) and each["own"]:
            counts = (str(each.get(name, "")) for name in ("transformers", "launches", "own"))
            text += f"| {kind} | {' | '.join(counts)} |\n"
    return text


def _grouped(kinds: Mapping[str, list[str]]) -> str:
    rows = sorted(kinds.items(), key=lambda each: (-len(each[1]), each[0]))
    lines = "".join(f"| {_escaped(reason)} | {', '.join(each)} |\n" for reason, each in rows)
    return f"| reason | model_type |\n|---|---|\n{lines}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")
