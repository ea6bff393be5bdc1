"""What the tests of whole models share: the trained checkpoint, prompts for it, and runners."""

from __future__ import annotations

from pathlib import Path

import hal
from hal.runtime.checkpoint import Checkpoint

TRAINED = Path(__file__).parents[1] / "checkpoints" / "tiny-python"

TEXTS = (
    "import ",
    "def __init__(self, name",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "for key, value in sorted(table.items()):\n",
    'if __name__ == "__main__":\n    ',
    "    try:\n        with open(path, encoding='utf-8') as file:\n            text = file.read()\n    except OSError as ",
    '"""Read and write',
    "def fibonacci(n):\n    # Every number is the sum of the two before it.\n    a, b = 0, 1\n    while a < n:\n        ",
)
"""Python to continue, of different lengths."""


def prompts() -> list[list[int]]:
    """:data:`TEXTS` as tokens of the trained checkpoint."""
    return [encoding.ids for encoding in Checkpoint.open(TRAINED).tokenizer().encode_batch(list(TEXTS))]


def open_runner(
    path: Path, compiler: str = "eager", *, dtype: str = "float32", num_tokens: int = 2048, block_size: int = 16
) -> hal.Runner:
    """A runner on the CPU, which becomes the active backend; its graphs are for batches of 2, 4 and 8."""
    backend = hal.open(
        {
            "backend": "cpu",
            "dtype": dtype,
            "compilation": {"compiler": compiler, "capture_sizes": [2, 4, 8]},
            "cache": {"num_tokens": num_tokens, "block_size": block_size},
        }
    )
    return hal.Runner(hal.load_model(path, backend), backend)
