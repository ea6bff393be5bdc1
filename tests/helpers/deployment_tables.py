"""The generated table of docs/how-to/plan-a-deployment.md. This file, as a program, writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from hal.bench.contenders.shapes import SHAPES
from hal.bench.prediction.assumptions import Assumptions
from hal.bench.prediction.deployments import WORKLOADS, Deployment, Planner

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/plan-a-deployment.md"
FILES = {name: ROOT / f"backends/npu/assumptions/ascend-{name}.toml" for name in ("910b", "a3")}
MODELS = {"Qwen3-32B": "qwen3-32b", "Qwen3-235B-A22B": "qwen3-235b-a22b"}
DEVICES = (8, 16, 32, 64)
PART = re.compile(r"(?<=<!-- generated: steps -->\n\n).*?(?=\n\n<!-- end -->)", re.DOTALL)


def generated() -> str:
    """Return the table."""
    return "\n".join(_steps())


def on_the_page() -> str:
    """Return the table as it is on the page."""
    (found,) = PART.findall(PAGE.read_text(encoding="utf-8"))
    return str(found)


def _steps() -> Iterator[str]:
    yield from _head("model", "machine", "devices", *(f"{each.name}, ms" for each in WORKLOADS))
    for model, shapes in MODELS.items():
        for name, file in FILES.items():
            planner = Planner(SHAPES[shapes], Assumptions.read(file))
            for number in DEVICES:
                yield _row(model, name, number, *(_step(planner.best(number, each)) for each in WORKLOADS))


def _step(found: Deployment | None) -> str:
    return "does not fit" if found is None else f"{1e3 * found.time.total:.1f} ({found.name})"


def _head(*columns: str) -> Sequence[str]:
    return [_row(*columns), f"|{'---|' * len(columns)}"]


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    PAGE.write_text(PART.sub(lambda _: generated(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
