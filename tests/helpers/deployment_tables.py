"""The generated parts of docs/how-to/plan-a-deployment.md. This file, as a program, writes them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from hal.bench.contenders.shapes import SHAPES
from hal.bench.prediction.assumptions import Assumptions
from hal.bench.prediction.deployments import WORKLOADS, Deployment, Planner
from hal.cli.plan_explanation import figures

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/plan-a-deployment.md"
FILES = {name: ROOT / f"backends/npu/assumptions/ascend-{name}.toml" for name in ("910b", "a3")}
MODELS = {"Qwen3-32B": "qwen3-32b", "Qwen3-235B-A22B": "qwen3-235b-a22b"}
DEVICES = (2, 4, 8, 16, 32, 64)
SHARED = 32
"""Devices of the table of ways to share experts."""
PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def generated() -> dict[str, str]:
    """Return the generated parts of the page, by name."""
    parts = {"assumptions": _assumptions, "steps": _steps, "parts": _parts, "experts": _experts}
    return {name: "\n".join(lines()) for name, lines in parts.items()}


def on_the_page() -> dict[str, str]:
    """Return the parts of the page as they are."""
    return {
        found[2]: found[0].removeprefix(found[1]).removesuffix(found[3]).strip("\n")
        for found in PART.finditer(PAGE.read_text(encoding="utf-8"))
    }


def _assumptions() -> Iterator[str]:
    read = {name: Assumptions.read(file) for name, file in FILES.items()}
    shown = {name: figures(each) for name, each in read.items()}
    yield from _head("figure", *(each.name for each in read.values()), "source")
    for key in next(iter(shown.values())):
        sources = dict.fromkeys(read[name].sources.get(key, "") for name in read)
        said = (
            "; ".join(f"{name}: {read[name].sources.get(key)}" for name in read)
            if len(sources) > 1
            else next(iter(sources))
        )
        yield _row(f"`{key}`", *(each[key] for each in shown.values()), said)


def _steps() -> Iterator[str]:
    for model, shapes in MODELS.items():
        for file in FILES.values():
            assumed = Assumptions.read(file)
            planner = Planner(SHAPES[shapes], assumed)
            yield f"**{model} on {assumed.name}**\n"
            yield from _head("devices", *(f"{each.name}, ms" for each in WORKLOADS))
            for number in DEVICES:
                yield _row(number, *(_step(planner.best(number, each)) for each in WORKLOADS))
            yield ""


def _parts() -> Iterator[str]:
    workload = next(each for each in WORKLOADS if each.name == "decode 32")
    yield from _head(
        "model", "devices", "copies x ranks", "GiB", "memory", "compute", "launches", "collectives", "step", "tokens/s"
    )
    for model, shapes in MODELS.items():
        planner = Planner(SHAPES[shapes], Assumptions.read(FILES["910b"]))
        for number in DEVICES:
            found = planner.best(number, workload)
            if found is not None:
                time = found.time
                parts = (time.memory, time.compute, time.launches, time.collectives, time.total)
                yield _row(
                    model,
                    number,
                    found.name,
                    f"{found.work.held / 2**30:.1f}",
                    *(f"{1e3 * each:.1f}" for each in parts),
                    f"{found.tokens_per_second:.0f}",
                )


def _step(found: Deployment | None) -> str:
    return "does not fit" if found is None else f"{1e3 * found.time.total:.1f} ({found.name})"


def _experts() -> Iterator[str]:
    config, stated = SHAPES[MODELS["Qwen3-235B-A22B"]], Assumptions.read(FILES["a3"])
    even = attrs.evolve(stated, experts=attrs.evolve(stated.experts, imbalance=1.0))
    workload = next(each for each in WORKLOADS if each.name == "decode 256")
    yield from _head(
        "copies x ranks",
        "GiB",
        "collectives of a layer",
        "KiB sent, even load",
        "KiB sent, busiest rank",
        "GiB of experts read",
        "step",
    )
    found = (Planner(config, each).deployments(SHARED, workload) for each in (even, stated))
    for balanced, busiest in zip(*found, strict=True):
        calls = Counter(each.operation for each in balanced.layer)
        sent = (f"{sum(each.sent for each in side.layer) / 2**10:.0f}" for side in (balanced, busiest))
        read = busiest.work.memory.parts["experts"] / 2**30
        held = f"{busiest.work.held / 2**30:.1f}{'' if busiest.fits else ', does not fit'}"
        yield _row(
            busiest.name,
            held,
            ", ".join(f"{times} {name}" for name, times in calls.items()) or "none",
            *sent,
            f"{read:.1f}",
            f"{1e3 * busiest.time.total:.1f}",
        )


def _head(*columns: str) -> Sequence[str]:
    return [_row(*columns), f"|{'---|' * len(columns)}"]


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    made = generated()
    text = PART.sub(
        lambda found: f"{found[1]}\n{made[found[2]].strip()}\n\n{found[3]}", PAGE.read_text(encoding="utf-8")
    )
    PAGE.write_text(text, encoding="utf-8")
