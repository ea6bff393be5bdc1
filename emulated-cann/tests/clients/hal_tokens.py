"""Prints prompts, hal's greedy tokens on the CPU, and the tokens tied with them: python hal_tokens.py CHECKPOINT DTYPE.

It prints JSON: ``prompts``, token ids, and ``allowed``, for each prompt and new token, the ids that rounding can put in
hal's place, hal's own first. :mod:`hal.ops.rounding` has the rule. Run it with ``tests`` in PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from helpers.one_device import OneDevice
from helpers.rank_programs import PROMPTS

import hal
from hal.ops.rounding import TIE_RATIO


def main() -> None:
    """Generate in the dtype, and along the same tokens in float32."""
    checkpoint, dtype = sys.argv[1:]
    tokenizer = hal.Checkpoint.open(checkpoint).tokenizer()
    known = OneDevice.of(Path(checkpoint), dtype, None).known
    allowed: list[list[list[int]]] = []
    for row, runs in enumerate(zip(known.rounded, known.exact, strict=True)):
        allowed.append([])
        for at, logits in enumerate(torch.stack([run.double() for run in runs], dim=1)):
            best = int(logits[0].argmax())
            tied = (logits - logits[:, best, None]).abs().amax(0) <= TIE_RATIO * known.error(row, at)
            allowed[-1].append([best, *(token for token in tied.nonzero()[:, 0].tolist() if token != best)])
    print(json.dumps({"prompts": [tokenizer.encode(text).ids for text in PROMPTS], "allowed": allowed}))  # noqa: T201


if __name__ == "__main__":
    main()
