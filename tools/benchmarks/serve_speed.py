"""Tokens per second of ``hal serve`` beside hal.LLM alone, on a CPU. Run it in a fresh process.

64 prompts get 48 tokens each. ``llm``: one call of ``hal.LLM.generate``. ``whole``: 64 requests at once. ``stream``: 64
streams at once. ``client`` is the CPU time of the client, which shares the machine's cores, for each second of
``stream``. Prints a JSON object for each model: the tokens per second of each way, as the median of the rounds, and the
ratios to ``llm``. Arguments: ``--rounds N``, and ``--checkpoint PATH`` for another model than the two.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import hal  # isort: skip  # torch is imported without vendors' extensions

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from helpers import ROOT
from helpers.api_server import command
from helpers.checkpoints import LARGE, random_checkpoint
from helpers.reference import TEXTS
from openai import AsyncOpenAI

PROMPTS, NEW = 64, 48
ROUNDS = int(sys.argv[sys.argv.index("--rounds") + 1]) if "--rounds" in sys.argv else 3
CACHE = {"num_tokens": 16384, "block_size": 16, "reuse_prefixes": False}
SIZES = [1, 8, 16, 32, 64]


def alone(checkpoint: Path, prompts: list[str]) -> float:
    """Return the tokens per second of hal.LLM."""
    config = {"cache": CACHE, "compilation": {"capture_sizes": SIZES}}
    with hal.LLM(checkpoint, backend="cpu", dtype="float32", compiler="graph", config=config) as llm:
        seconds = []
        for _ in range(ROUNDS + 1):
            start = time.perf_counter()
            made = llm.generate(prompts, max_new_tokens=NEW, temperature=0, ignore_eos=True)
            seconds.append(time.perf_counter() - start)
            assert sum(len(each.token_ids) for each in made) == PROMPTS * NEW
    return PROMPTS * NEW / statistics.median(seconds[1:])


async def served(url: str, prompts: list[str]) -> dict[str, float]:
    """Return the tokens per second of a server."""
    asked: Any = {"model": "tiny", "max_tokens": NEW, "temperature": 0, "extra_body": {"ignore_eos": True}}
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:

        async def whole(prompt: str) -> None:
            answer = await client.completions.create(prompt=prompt, **asked)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == NEW

        async def stream(prompt: str) -> None:
            async for _ in await client.completions.create(prompt=prompt, stream=True, **asked):
                pass

        found: dict[str, list[float]] = {"whole": [], "stream": [], "client": []}
        for number in range(ROUNDS + 1):
            for name, one in (("whole", whole), ("stream", stream)):
                start, spent = time.perf_counter(), time.process_time()
                await asyncio.gather(*map(one, prompts))
                seconds = time.perf_counter() - start
                if number:
                    found[name].append(PROMPTS * NEW / seconds)
                    if name == "stream":
                        found["client"].append((time.process_time() - spent) / seconds)
    return {name: statistics.median(each) for name, each in found.items()}


def measure(name: str, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Return the figures of a model."""
    prompts = [TEXTS[index % len(TEXTS)] for index in range(PROMPTS)]
    figures = {"llm": alone(checkpoint, prompts)}
    arguments = ("--backend", "cpu", "--dtype", "float32", "--compiler", "graph", "--served-name", "tiny")
    environment = {"HAL_CACHE": json.dumps(CACHE), "HAL_COMPILATION__CAPTURE_SIZES": json.dumps(SIZES)}
    with command(checkpoint, folder / "log", *arguments, **environment) as server:
        figures |= asyncio.run(served(server.url, prompts))
    ratios = {each: round(figures[each] / figures["llm"], 2) for each in ("whole", "stream")}
    return {"model": name, **{each: round(value, 2) for each, value in figures.items()}, "ratio": ratios}


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if "--checkpoint" in sys.argv:
            given = Path(sys.argv[sys.argv.index("--checkpoint") + 1])
            models = {given.name: given}
        else:
            large = random_checkpoint(folder / "large", **LARGE)
            models = {"tiny-python": ROOT / "checkpoints/tiny-python", "large": large}
        for name, checkpoint in models.items():
            sys.stdout.write(json.dumps(measure(name, checkpoint, folder)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
