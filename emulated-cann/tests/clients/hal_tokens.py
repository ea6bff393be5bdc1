"""Prints prompts and hal's greedy tokens on the CPU, as JSON: python hal_tokens.py CHECKPOINT."""

from __future__ import annotations

import json
import sys

from transformers import AutoTokenizer

import hal

NEW = 24
TEXTS = (
    "def read_file(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n\n\ndef main(argv):\n" * 4,
)


def main() -> None:
    """Generate after three prompts of different lengths."""
    prompts = [AutoTokenizer.from_pretrained(sys.argv[1])(text).input_ids for text in TEXTS]
    found: list[list[int]] = [[] for _ in prompts]
    with hal.open({"backend": "cpu", "dtype": "bfloat16", "cache": {"num_tokens": 1024}}) as backend:
        runner = hal.Runner(hal.load_model(sys.argv[1], backend), backend)
        for token in hal.generate(runner, prompts, hal.SamplingParams(max_new_tokens=NEW)):
            found[token.prompt_index].append(token.token_id)
    print(json.dumps({"prompts": prompts, "tokens": found}))  # noqa: T201


if __name__ == "__main__":
    main()
