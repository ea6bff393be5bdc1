"""Times texts with and without drafts, by turns: tokens a second, and what the model accepts.

python tools/benchmarks/draft_speed.py checkpoints/tiny-python ngram --prompts-file prompts.txt --batch-size 1
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click

import hal

PROMPTS = (
    "def mean(values):\n    return sum(values) / len(values)\n\n\ndef median(values):\n    return",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n\n    def",
    "for name in names:\n    print(name)\n\nfor value in values:\n    print(value)\n\nfor key in",
    "assert add(1, 2) == 3\nassert add(2, 2) == 4\nassert add(3, 2) == 5\nassert add(",
)


@click.command()
@click.argument("checkpoint")
@click.argument("drafts", nargs=-1, required=True)
@click.option("--batch-size", default=1)
@click.option("--rounds", default=5)
@click.option("--tokens", default=64)
@click.option("--dtype", default="auto")
@click.option("--compiler", default="graph")
@click.option("--temperature", default=0.0)
@click.option("--prompts-file", type=click.Path(path_type=Path), help="One prompt in each line, as a JSON text.")
def command(checkpoint: str, drafts: Sequence[str], batch_size: int, rounds: int, tokens: int, **options: Any) -> None:
    """Compare DRAFTS, each a name or a JSON object, with plain decoding of CHECKPOINT."""
    file = options["prompts_file"]
    prompts = list(map(json.loads, file.read_text().splitlines())) if file else list(PROMPTS)
    given: dict[str, Any] = {"dtype": options["dtype"], "compiler": options["compiler"], "max_sequences": batch_size}
    sides: list[tuple[str, Any]] = [("plain", None)]
    sides += [(each, json.loads(each) if each.startswith("{") else each) for each in drafts]
    opened = [hal.LLM(checkpoint, backend="cpu", max_length=1024, draft=draft, **given) for _, draft in sides]
    rates: list[list[float]] = [[] for _ in sides]
    texts: list[list[Any]] = [[] for _ in sides]
    for _ in range(rounds + 1):
        for llm, rate, made in zip(opened, rates, texts, strict=True):
            began, count = time.perf_counter(), 0
            for start in range(0, len(prompts), batch_size):
                some = prompts[start : start + batch_size]
                how = {"temperature": options["temperature"], "seed": 1, "ignore_eos": True}
                found = llm.generate(some, max_new_tokens=tokens, **how)
                made.append([each.token_ids for each in found])
                count += sum(len(each.token_ids) for each in found)
            rate.append(count / (time.perf_counter() - began))
    for (name, _), llm, rate, made in zip(sides, opened, rates, texts, strict=True):
        ratio = median(one / plain for one, plain in zip(rate[1:], rates[0][1:], strict=True))
        same = sum(one == plain for one, plain in zip(made, texts[0], strict=True)) / len(made)
        click.echo(
            f"{name}: {median(rate[1:]):.1f} tokens/s, {ratio:.2f} x plain, {100 * same:.0f} % equal; {llm.acceptance}"
        )
        llm.close()


if __name__ == "__main__":
    command()
