"""Compare greedy tokens of trained checkpoints through transformers' code in hal with transformers' own, in float32.

    python tests/families/trained.py [--prompts 20] [--tokens 64] [--compilers eager,graph,piecewise] FOLDER...

A token may differ where transformers' two best logits are closer than rounding; such ties are counted, and what follows
one is not compared.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

import hal
from hal.checkpoint.checkpoint import Checkpoint

TEXTS = (
    "def fibonacci(n):",
    "The capital of France is",
    "import numpy as np\n\ndef mean(values):",
    "Once upon a time, there was a",
    "class Stack:\n    def __init__(self):",
    "The three laws of thermodynamics are",
    "for key, value in sorted(table.items()):",
    "Water boils at a temperature of",
    "def quicksort(items):\n    if len(items) < 2:",
    "In 1969, the first person to walk on the",
    "SELECT name, age FROM people WHERE",
    "A prime number is a number that",
    "# Read a file and count its lines\n",
    "To bake bread you need flour, water,",
    "#include <stdio.h>\n\nint main(",
    "The largest planet of the solar system is",
    "async def fetch(session, url):",
    "My favourite season is autumn, because",
    "def binary_search(items, wanted):\n    low, high = 0, len(items)\n",
    "Photosynthesis is the process by which",
)
TIE = 1e-4
"""How close two logits are that rounding may exchange, in parts of the largest."""


def theirs(folder: Path, prompts: list[list[int]], count: int) -> tuple[list[list[int]], Any]:
    """Return transformers' greedy tokens, one prompt at a time, and its model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    found = []
    for prompt in prompts:
        given = torch.tensor([prompt])
        made = model.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=count, pad_token_id=0
        )
        found.append(made[0, len(prompt) :].tolist())
    return found, model


def gap(model: Any, tokens: list[int], one: int, other: int) -> float:
    """Return how far transformers' logits of two tokens are apart behind others, in parts of the largest."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens])).logits[0, -1]
    return float((logits[one] - logits[other]).abs() / logits.abs().max())


def compared(
    ours: list[list[int]], wanted: list[list[int]], prompts: list[list[int]], model: Any
) -> tuple[int, int, int]:
    """Return the numbers of equal continuations, of those that part at a tie, and of others."""
    equal = ties = wrong = 0
    for got, own, prompt in zip(ours, wanted, prompts, strict=True):
        place = next((place for place, (a, b) in enumerate(zip(got, own, strict=True)) if a != b), None)
        if place is None:
            equal += 1
        elif gap(model, prompt + own[:place], got[place], own[place]) < TIE:
            ties += 1
        else:
            wrong += 1
    return equal, ties, wrong


def main() -> None:
    """Print a line for each checkpoint and compiler."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=len(TEXTS))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--compilers", default="eager,graph,piecewise")
    parser.add_argument("folders", nargs="+", type=Path)
    given = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    for folder in given.folders:
        texts = list(TEXTS[: given.prompts])
        prompts = [each.ids for each in Checkpoint.open(folder).tokenizer().encode_batch(texts)]
        start = time.monotonic()
        wanted, model = theirs(folder, prompts, given.tokens)
        sys.stdout.write(f"{folder.name} transformers: {time.monotonic() - start:.0f} s\n")
        for compiler in given.compilers.split(","):
            compilation: dict[str, Any] = {"compiler": compiler}
            if compiler != "eager":
                compilation["capture_sizes"] = [len(prompts)]
            if compiler == "piecewise":
                compilation["prefill"] = {"capture_sizes": [256]}
            config = {
                "backend": "cpu",
                "dtype": "float32",
                "model_source": "transformers",
                "check_model": False,
                "cache": {"num_tokens": 4096},
                "compilation": compilation,
            }
            start = time.monotonic()
            with hal.open(config) as backend, hal.Runner(hal.load_model(folder, backend), backend) as runner:
                made: list[list[int]] = [[] for _ in prompts]
                for token in hal.generate(runner, prompts, hal.SamplingParams(max_new_tokens=given.tokens)):
                    made[token.prompt_index].append(token.token_id)
            equal, ties, wrong = compared(made, wanted, prompts, model)
            seconds = time.monotonic() - start
            sys.stdout.write(
                f"{folder.name} {compiler}: {equal} equal, {ties} ties, {wrong} wrong; {seconds:.0f} s" + "\n"
            )


if __name__ == "__main__":
    main()
