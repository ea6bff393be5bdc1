"""Steps of a runner against a transformers model's own logits: prompts, decoding, chunks and a shared prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import hal
from hal.step import ALL, LAST

LENGTHS, DECODED = (21, 5, 13), 8
"""Tokens of the prompts, and the tokens that follow each."""
BLOCKS = [[1, 2], [3], [4, 5]]


def config_for(compiler: str, **more: Any) -> dict[str, Any]:
    """Return hal's configuration for these steps on the CPU."""
    compilation: dict[str, Any] = {"compiler": compiler}
    if compiler != "eager":
        compilation["capture_sizes"] = [4]
    if compiler.startswith("piecewise"):
        compilation["prefill"] = {"capture_sizes": [64]}
    return {
        "backend": "cpu",
        "dtype": "float32",
        "model_source": "transformers",
        "cache": {"num_tokens": 512, "block_size": 16},
        "compilation": compilation,
        **more,
    }


def tokens_for(vocab_size: int, decoded: int = DECODED) -> list[list[int]]:
    """Return the tokens of the sequences, of which so many are decoded."""
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(3, min(vocab_size, 101), (length + decoded,), generator=generator).tolist() for length in LENGTHS
    ]


def own_logits(model: Any, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return what transformers computes for each sequence, ``[tokens, vocab_size]``."""
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([row])).logits[0].float() for row in rows]


def differences(runner: hal.Runner, rows: Sequence[Sequence[int]], wanted: Sequence[Tensor]) -> dict[str, float]:
    """Return how far logits differ at most, in parts of the largest, by what the steps do."""
    found: dict[str, list[float]] = {"prompts": [], "decoding": [], "chunks": []}

    def compare(kind: str, got: Tensor, expected: Tensor) -> None:
        worst = float((got.cpu().float() - expected).abs().max() / expected.abs().max().clamp(min=1.0))
        found[kind].append(worst if worst == worst else float("inf"))

    prompts = [list(row[:length]) for row, length in zip(rows, LENGTHS, strict=True)]
    got = runner.step(runner.batch(prompts, BLOCKS), rows=ALL).logits
    for part, expected, length in zip(got.split(list(LENGTHS)), wanted, LENGTHS, strict=True):
        compare("prompts", part, expected[:length])
    for step in range(len(rows[0]) - LENGTHS[0]):
        cached = [length + step for length in LENGTHS]
        new = [[row[each]] for row, each in zip(rows, cached, strict=True)]
        got = runner.step(runner.batch(new, BLOCKS, cached=cached), rows=LAST).logits
        for row, expected, place in zip(got, wanted, cached, strict=True):
            compare("decoding", row, expected[place])
    # Chunks of the first prompt, each beside a sequence that decodes and a new prompt.
    for start, end in ((0, 8), (8, 16), (16, 21)):
        new = [list(rows[0][start:end]), [rows[2][20]], prompts[1]]
        got = runner.step(runner.batch(new, [[6, 7], [4, 5], [8]], cached=[start, 20, 0])).logits
        for row, expected in zip(got, (wanted[0][end - 1], wanted[2][20], wanted[1][4]), strict=True):
            compare("chunks", row, expected)
    got = runner.step(runner.batch([list(rows[0][16:23])], [[6, 9]], cached=[16])).logits
    compare("chunks", got[0], wanted[0][22])
    return {kind: max(each) for kind, each in found.items()}
