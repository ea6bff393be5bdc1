"""The config.json of published models, with their keys and choices, and with small sizes.

The files of `published_configs` have the spelling of those that were published: older names of keys, keys of training,
nested tables, and lists for each layer. The weights of MiniMax-M2 are published in FP8, and those of GPT-OSS in MXFP4.
Those of GLM-5.2, GLM-5.3, Kimi-Linear, MiniMax-M3 and Qwen3.8 have the keys that transformers' configuration classes
read.
"""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hal
from helpers import checkpoints


def _read(folder: str) -> dict[str, dict[str, Any]]:
    files = sorted(Path(__file__).with_suffix("").joinpath(folder).glob("*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


CONFIGS = _read("hal")
"""By the model's name, of families that hal has."""
OTHERS = _read("transformers")
"""By the model's name, of families that run with transformers' code."""
VOCABULARY = 96
"""The size of each model's vocabulary."""
DISTANCE = 0.1
"""Difference of the experts of a layer from each other, relative to their weights, so that near ties matter little."""


def write(folder: Path, name: str, seed: int = 0, **changes: Any) -> Path:
    """Write a checkpoint with random weights, which bfloat16 represents, of the config with this name and changes."""
    config = {**CONFIGS[name], **changes}
    weights = {}
    for key, info in hal.RandomCheckpoint.of(name, config).tensors.items():
        noise = _noise(key, info.shape, seed)
        if not info.is_floating_point:  # a table of experts
            weights[key] = noise.argsort(-1).int()
            continue
        if ".experts." in key:
            same = _noise(re.sub(r"\.\d+\.(?=\w+\.weight$)", ".", key), info.shape, seed)
            noise = (same[:1] if len(info.shape) == 3 else same) + DISTANCE * noise
        if len(info.shape) == 1:
            values = (0.0 if key.endswith(("bias", "sinks")) else 1.0) + 0.2 * noise
        else:
            values = noise * info.shape[-1] ** -0.5
        weights[key] = values.bfloat16().contiguous()
    folder.mkdir(parents=True)
    checkpoints.write_json(folder / "config.json", config)
    checkpoints.write_weights(folder, weights)
    return folder


def _noise(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + zlib.crc32(name.encode())))
