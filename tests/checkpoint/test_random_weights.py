"""Tests of checkpoints with random weights, which need a config.json only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import hal
from hal.errors import CheckpointError


def tokens(runner: hal.Runner) -> list[int]:
    return [each.token_id for each in hal.generate(runner, [[5, 6, 7]], hal.SamplingParams(max_new_tokens=8))]


def test_a_model_may_start_with_random_weights(trained: Path, tmp_path: Path) -> None:
    shutil.copy(trained / "config.json", tmp_path)
    with hal.open({"backend": "cpu", "cache": {"num_tokens": 256}}, activate=False) as backend:
        loaded = hal.Runner(hal.load_model(trained, backend), backend)
        runner = hal.Runner(hal.load_model(hal.RandomCheckpoint.open(tmp_path), backend), backend)
        assert tokens(runner) != tokens(loaded)
        checkpoint = hal.Checkpoint.open(trained)
        hal.replace_weights(runner, {name: each.clone() for name, each in checkpoint.read(checkpoint.tensors)})
        assert tokens(runner) == tokens(loaded)


def test_random_weights_are_not_quantized(trained: Path, tmp_path: Path) -> None:
    config = json.loads((trained / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {}}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"quantization_config in config\.json, and random weights are not"):
        hal.RandomCheckpoint.open(tmp_path)


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"it has no config\.json"):
        hal.RandomCheckpoint.open(tmp_path)
