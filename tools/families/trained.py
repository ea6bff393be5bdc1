"""Compare greedy tokens of trained checkpoints through transformers' code in hal with transformers' own, in float32.

    python tools/families/trained.py [--prompts 20] [--tokens 64] [--compilers eager,graph] FOLDER...

A token may differ where transformers' two best logits are closer than rounding; such ties are counted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
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


def compared(model: Any, prompt: list[int], made: list[int]) -> str:
    """Return whether made tokens are transformers' greedy ones: ``equal``, ``ties`` or ``wrong``.

    One call of the model gives its choice behind the prompt and all made tokens but the last.
    """
    given = torch.tensor([prompt + made[:-1]])
    with torch.inference_mode():
        logits = model(input_ids=given, use_cache=False).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(made)[:, None]).squeeze(1)
    missing = (logits.amax(-1) - chosen) / logits.abs().amax(-1)
    if torch.equal(logits.argmax(-1), torch.tensor(made)):
        return "equal"
    return "ties" if float(missing.max()) < TIE else "wrong"


def main() -> None:
    """Print a line for each checkpoint and compiler."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=len(TEXTS))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--compilers", default="eager,graph,piecewise,inductor")
    parser.add_argument("folders", nargs="+", type=Path)
    given = parser.parse_args()
    from transformers import AutoModelForCausalLM

    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    for folder in given.folders:
        texts = list(TEXTS[: given.prompts])
        prompts = [each.ids for each in Checkpoint.open(folder).tokenizer().encode_batch(texts)]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        judged: dict[tuple[int, ...], str] = {}
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
            seconds = time.monotonic() - start
            for prompt, tokens in zip(prompts, made, strict=True):
                whole = (*prompt, *tokens)
                judged[whole] = judged.get(whole) or compared(model, prompt, tokens)
            counts = Counter(judged[(*prompt, *tokens)] for prompt, tokens in zip(prompts, made, strict=True))
            shown = ", ".join(f"{counts[each]} {each}" for each in ("equal", "ties", "wrong"))
            sys.stdout.write(f"{folder.name} {compiler}: {shown}; {seconds:.0f} s\n")


if __name__ == "__main__":
    main()
