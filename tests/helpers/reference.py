"""Prompts for the trained checkpoint, and runners, for tests of whole models."""

from __future__ import annotations

from pathlib import Path

import hal
from hal.checkpoint.checkpoint import Checkpoint

TEXTS = (
    "import ",
    "def __init__(self, name",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "for key, value in sorted(table.items()):\n",
    'if __name__ == "__main__":\n    ',
    "    try:\n        with open(path, 'rb') as file:\n            data = file.read()\n    except OSError as ",
    '"""Read and write',
    "def fibonacci(n):\n    # Each number is the sum of the last two.\n    a, b = 0, 1\n    while a < n:\n        ",
)
"""Python to continue, of different lengths."""


def prompts(trained: Path) -> list[list[int]]:
    """Return :data:`TEXTS` as tokens of the trained checkpoint."""
    return [encoding.ids for encoding in Checkpoint.open(trained).tokenizer().encode_batch(list(TEXTS))]


def open_runner(
    path: Path,
    compiler: str = "eager",
    *,
    dtype: str = "float32",
    num_tokens: int = 2048,
    block_size: int = 16,
    model_class: type[hal.nn.CausalLM] | None = None,
) -> hal.Runner:
    """Open and activate the CPU backend with graphs for batches of 2, 4 and 8; return a runner."""
    backend = hal.open(
        {
            "backend": "cpu",
            "dtype": dtype,
            "compilation": {"compiler": compiler, "capture_sizes": [2, 4, 8]},
            "cache": {"num_tokens": num_tokens, "block_size": block_size},
        }
    )
    return hal.Runner(hal.load_model(path, backend, model_class=model_class), backend)
