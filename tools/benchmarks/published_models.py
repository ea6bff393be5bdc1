"""Greedy texts of published checkpoints: hal's against those of transformers, in float32 on the CPU.

Continues twenty prompts by 64 tokens with every compiler. One forward of transformers for each text then says which
token it would choose at each place; its own greedy text is the same if it chooses every token. Prints a JSON object for
each checkpoint and compiler: how many texts are the same, and for each other one the first other token, with the
distance of the two logits in transformers relative to the largest, which shows a tie. Exits with 1 if a text differs.

Arguments: the folders of checkpoints; ``--compiler NAME``, repeatable; ``--tokens N``; ``--prompts N``. Compare
backends in 16 bits with `hal compare`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hal  # isort: skip  # torch is imported without vendors' extensions

import torch
from transformers import AutoModelForCausalLM

COMPILERS = ("eager", "graph", "piecewise", "inductor")
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "Once upon a time, in a small village,",
    "The three primary colors are",
    "import numpy as np\n\ndef normalize(x):\n",
    "The largest planet in the solar system is",
    "A recipe for pancakes needs",
    "In 1969, the first humans",
    "SELECT name, COUNT(*) FROM orders",
    "The opposite of hot is",
    "To install a Python package, run",
    "Shakespeare wrote",
    "class Stack:\n    def __init__(self):\n",
    "The speed of light is about",
    "My favorite season is autumn, because",
    "Q: What is 12 times 12?\nA:",
    "The mitochondria is",
    "for i in range(10):\n    print(",
    "Photosynthesis is the process by which",
)


def our_texts(folder: Path, compiler: str, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """Return our greedy continuations, of all prompts in one batch."""
    compilation = {"compiler": compiler, "capture_sizes": [len(prompts)]}
    backend = hal.open(
        {"backend": "cpu", "dtype": "float32", "compilation": compilation, "cache": {"num_tokens": 4096}}
    )
    runner = hal.Runner(hal.load_model(folder, backend), backend)
    texts: list[list[int]] = [[] for _ in prompts]
    for token in hal.generate(runner, prompts, hal.SamplingParams(max_new_tokens=count)):
        texts[token.prompt_index].append(token.token_id)
    return texts


def differences(model: Any, prompts: Sequence[list[int]], texts: Sequence[list[int]]) -> Iterator[dict[str, Any]]:
    """Yield the first token of each text that transformers would not choose."""
    for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + text[:-1]])).logits[0, len(prompt) - 1 :]
        chosen = logits.argmax(-1).tolist()
        for place, (mine, other) in enumerate(zip(text, chosen, strict=True)):
            if mine != other:
                apart = float((logits[place, other] - logits[place, mine]) / logits[place].abs().max())
                yield {"prompt": index, "token": place, "apart": apart}
                break


def tell(figures: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--compiler", action="append", choices=COMPILERS)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    given = parser.parse_args()
    failed = False
    for folder in given.folders:
        tokenizer = hal.Checkpoint.open(folder).tokenizer()
        prompts = [encoding.ids for encoding in tokenizer.encode_batch(list(PROMPTS[: given.prompts]))]
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        for compiler in given.compiler or COMPILERS:
            start = time.perf_counter()
            ours = our_texts(folder, compiler, prompts, given.tokens)
            seconds = round(time.perf_counter() - start)
            differing = list(differences(model.eval(), prompts, ours))
            failed |= bool(differing)
            figures = {
                "checkpoint": folder.name,
                "compiler": compiler,
                "texts": len(prompts),
                "same": len(prompts) - len(differing),
                "tokens": sum(map(len, ours)),
                "seconds": seconds,
                "differing": differing,
            }
            tell(figures)
    sys.exit(failed)


if __name__ == "__main__":
    main()
