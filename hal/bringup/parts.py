"""The parts of a bring-up: what each runs, and what its output says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

Status = Literal["passed", "failed", "late"]
PROMPTS = (
    "The capital of France is",
    "def read_lines(path):\n",
    "1, 2, 3, 4,",
    "class Stack:\n    def __init__(self):\n",
)
"""What both devices continue."""
NEW_TOKENS = 24


@attrs.frozen(kw_only=True)
class Request:
    """What is brought up.

    Attributes:
        against: the driver that it is compared with.
        emulate: whether the driver runs on its emulated device.
        dtype: the dtype of both.
        conformance: which cases run.
        seconds: the most time of a part.
    """

    checkpoint: str
    backend: str
    against: str = "cpu"
    emulate: bool = False
    dtype: str = "float16"
    conformance: Literal["short", "whole", "none"] = "short"
    seconds: float = 1800.0


@attrs.frozen(kw_only=True)
class Part:
    """A part: a command of hal.

    Attributes:
        name: names its files.
        title: says what it checks.
        arguments: of the command ``hal``; empty for the conformance suite.
        judge: returns whether its output, the values of its JSON, is good, and what it says.
        figures: whether the command writes its JSON to the file FIGURES, and not to stdout.
    """

    name: str
    title: str
    arguments: tuple[str, ...] = ()
    judge: Callable[[list[Any]], tuple[bool, list[str]]]
    figures: bool = False


@attrs.define(kw_only=True)
class Outcome:
    """What became of a part.

    Attributes:
        name, title: as of the part.
        status: whether it passed, failed, or was ended because its time was over.
        lines: what it says.
        log: the last lines of its stderr.
    """

    name: str
    title: str
    command: str
    status: Status
    seconds: float
    lines: list[str]
    data: list[Any] = attrs.field(factory=list)
    log: list[str] = attrs.field(factory=list)


def parts(request: Request) -> Iterator[Part]:
    """Yield the parts, in their order."""
    emulate = ("--emulate",) if request.emulate else ()
    device, other = ("--backend", request.backend), ("--backend", request.against)
    common = ("--dtype", request.dtype)
    prompts = tuple(each for prompt in PROMPTS for each in ("--prompt", prompt))
    yield Part(
        name="doctor",
        title="Versions, the device, and its basic computations",
        arguments=("doctor", *device, *emulate, "--json", "--timeout", f"{request.seconds / 3:g}"),
        judge=_doctor,
    )
    if request.conformance != "none":
        yield Part(name="conformance", title=f"The conformance suite ({request.conformance})", judge=_conformance)
    texts = ("generate", request.checkpoint, *prompts, "--max-new-tokens", str(NEW_TOKENS), "--greedy", "--json")
    reference = ("--compiler", "eager")
    yield Part(
        name="reference",
        title=f"Texts on {request.against}",
        arguments=(*texts, *common, *other, *reference),
        judge=_texts,
    )
    for compiler in ("eager", "graph"):
        yield Part(
            name=f"texts-{compiler}",
            title=f"The same texts on {request.backend}, {compiler}",
            arguments=(*texts, *common, *device, *emulate, "--compiler", compiler),
            judge=_texts,
        )
    yield Part(
        name="operations",
        title=f"Each operation of the model on {request.backend} and on {request.against}",
        arguments=("compare", request.checkpoint, *other, *device, *emulate, *common, *prompts[:4], "--json"),
        judge=_operations,
    )
    bench = (request.checkpoint, *common, *device, *emulate, "--batch-size", "1", "--batch-size", "8")
    yield Part(
        name="decode",
        title="Speed and kernel launches of a decode step",
        arguments=("bench", "decode", *bench, "--trace"),
        judge=_speed,
        figures=True,
    )
    yield Part(
        name="prefill",
        title="Speed of a prefill",
        arguments=("bench", "prefill", request.checkpoint, *common, *device, *emulate, "--tokens", "256"),
        judge=_speed,
        figures=True,
    )


def compare_texts(outcomes: Sequence[Outcome]) -> None:
    """Let the texts of a device fail where they are not those of the reference; say how many tokens agree."""
    reference = next((each for each in outcomes if each.name == "reference"), None)
    if reference is None or reference.status != "passed":
        return
    for each in outcomes:
        if not each.name.startswith("texts-") or each.status != "passed":
            continue
        pairs = [
            (ours["token_ids"], theirs["token_ids"]) for ours, theirs in zip(each.data, reference.data, strict=True)
        ]
        equal = [
            next((i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), min(map(len, pair)))
            for pair in pairs
        ]
        same = sum(ours == theirs for ours, theirs in pairs)
        each.lines.insert(0, f"{same} of {len(pairs)} texts are the reference's")
        each.lines += [
            f"prompt {index}: the first {count} tokens agree, of {len(pair[1])}; then rounding may choose another"
            for index, (count, pair) in enumerate(zip(equal, pairs, strict=True))
            if pair[0] != pair[1]
        ]
        if equal.count(0) * 2 >= len(equal):  # Rounding may choose another first token in one, not in half of them.
            each.status = "failed"


def _doctor(found: list[Any]) -> tuple[bool, list[str]]:
    (document,) = found
    lines = [f"hal {document['hal']}, torch {document['torch']['version']}, Python {document['python']}"]
    for driver in document["drivers"]:
        lines.append(f"{driver['name']}: {driver['status']}: {driver['reason']}")
        lines += [driver["hint"]] if driver["status"] != "works" and driver["hint"] else []
    return bool(document["ok"]), lines


def _conformance(found: list[Any]) -> tuple[bool, list[str]]:
    counts = {status: sum(each["status"] == status for each in found) for status in ("passed", "skipped")}
    wrong = [each for each in found if each["status"] not in counts]
    lines = [f"{counts['passed']} cases passed, {counts['skipped']} were skipped, {len(wrong)} failed"]
    lines += [f"{each['name']}: {each['status']}: {each['message'][:300]}" for each in wrong[:50]]
    if len(wrong) > 50:
        lines.append(f"and {len(wrong) - 50} more, in report.json")
    return bool(counts["passed"]) and not wrong, lines


def _texts(found: list[Any]) -> tuple[bool, list[str]]:
    return len(found) == len(PROMPTS), [f"{each['prompt']!r} -> {each['text']!r}" for each in found]


def _operations(found: list[Any]) -> tuple[bool, list[str]]:
    ((comparison,),) = found
    lines = [f"{comparison['tokens'] - len(comparison['choices'])} of {comparison['tokens']} tokens agree"]
    if (broken := comparison["broken"]) is not None:
        call = broken["call"]
        lines.insert(0, f"first operation out of tolerance: {call['operation']} in {call['path']}")
    return bool(comparison["agrees"]), lines


def _speed(found: list[Any]) -> tuple[bool, list[str]]:
    (document,) = found
    lines = [
        f"{each['contender']}, batch {each['batch_size']}: {each['median_seconds'] * 1e3:.3f} ms, "
        f"{each['tokens_per_second']:.1f} tokens/s, {each['times_floor']:.1f} times the floor"
        for each in document["measurements"]
    ]
    lines += [
        f"{each['contender']}, batch {each['batch_size']}: {each['per_layer']} kernel launches per layer"
        for each in document["launches"]
    ]
    return bool(lines), [*lines, *document["notes"]]


def read_output(file: Path) -> list[Any]:
    """Return the values of JSON in a file: one document, or one a line. What is no JSON is left out."""
    content = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    try:
        return [json.loads(content)]
    except ValueError:
        found = []
        for line in content.splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found
