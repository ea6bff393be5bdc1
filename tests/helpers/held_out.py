"""Perplexity of a model on held-out text, for the trained checkpoint."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import hal
from hal.step import ALL
from helpers import ROOT

TRAINING = ROOT / "tools" / "checkpoints" / "train.py"


@cache
def texts() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the standard library files on which the trained checkpoint was trained, and the held-out ones.

    Another version of Python has other files, but the two sets never overlap.
    """
    spec = importlib.util.spec_from_file_location("train_tiny_python", TRAINING)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    training, held_out = module.read_library()
    return tuple(training), tuple(held_out)


def tokens(checkpoint: hal.Checkpoint, most: int | None = None) -> list[int]:
    """Return the first ``most`` tokens of the held-out text; each file ends with the end-of-text token."""
    tokenizer, stream = checkpoint.tokenizer(), []
    (end,) = sorted(checkpoint.stop_token_ids)
    for text in texts()[1]:
        stream += [*tokenizer.encode(text).ids, end]
        if most is not None and len(stream) > most:
            break
    return stream[:most]


def perplexity(runner: hal.Runner, stream: list[int], window: int = 1024) -> float:
    """Compute the perplexity of all tokens but the first, in separate windows, with prefills."""

    def logits(piece: list[int]) -> Tensor:
        return runner.step(runner.batch([piece], [blocks]), ALL).logits

    blocks = runner.blocks.take(runner.spec.blocks_for(window))
    assert blocks is not None
    try:
        return _perplexity(logits, stream, window)
    finally:
        runner.blocks.give_back(blocks)


def decoded_perplexity(runner: hal.Runner, stream: list[int], sequences: int, window: int) -> float:
    """Compute the perplexity of the first ``sequences`` windows by decoding, one token of each per step."""
    per_row = runner.spec.blocks_for(window)
    blocks = runner.blocks.take(per_row * sequences)
    assert blocks is not None
    rows = [blocks[row * per_row : (row + 1) * per_row] for row in range(sequences)]
    pieces = [stream[row * window : (row + 1) * window + 1] for row in range(sequences)]
    total = 0.0
    try:
        for step in range(window):
            batch = runner.batch([[piece[step]] for piece in pieces], rows, cached=[step] * sequences)
            total += _nats(runner.step(batch).logits, [piece[step + 1] for piece in pieces])
    finally:
        runner.blocks.give_back(blocks)
    return math.exp(total / (sequences * window))


def _perplexity(logits: Callable[[list[int]], Tensor], stream: list[int], window: int) -> float:
    total = 0.0
    for start in range(0, len(stream) - 1, window):
        piece = stream[start : start + window + 1]
        total += _nats(logits(piece[:-1]), piece[1:])
    return math.exp(total / (len(stream) - 1))


def _nats(logits: Tensor, targets: list[int]) -> float:
    with torch.inference_mode():
        return functional.cross_entropy(logits.float().cpu(), torch.tensor(targets), reduction="sum").item()
