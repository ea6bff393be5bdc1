"""Tests of the ways in which an encoder's steps run: captured, uncaptured, and compiled by Inductor."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.seeing import build, item
from helpers.thorough import EXHAUSTIVE, LONG, thorough

import hal
from hal.errors import ConfigError


def open_runner(path: Path, encoder: dict[str, Any], compiler: str = "graph") -> hal.Runner:
    compilation = {"compiler": compiler, "capture_sizes": [1], "encoder": encoder}
    config = {"backend": "cpu", "dtype": "float32", "compilation": compilation, "cache": {"num_tokens": 64}}
    backend = hal.open(config)
    return hal.Runner(hal.load_model(path, backend), backend)


@pytest.fixture(scope="module", params=["Qwen3VL", "Qwen2_5_VL"])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, list[Any]]:
    """A model, and the embeddings of groups of images with its Python code."""
    path = tmp_path_factory.mktemp(request.param)
    model, draw = build(request.param, 2, path), random.Random(5)
    images = [item(draw, model, size=(1, *size)) for size in ((4, 4), (8, 4), (6, 10), (2, 6), (16, 16))]
    groups = [images[:2], images[2:4], [images[1]], images[:4], [images[4]]]
    with open_runner(path, {}, "eager") as runner:
        expected = [[each.clone() for each in runner.encode(group)] for group in groups]
    return model, path, list(zip(groups, expected, strict=True))


@thorough(EXHAUSTIVE, r"\[Qwen3VL-")
@thorough(LONG, r"-inductor\]")
@pytest.mark.parametrize("compiler", ["graph", "inductor"])
def test_the_same_embeddings(compiler: str, seeing: tuple[Any, Path, list[Any]]) -> None:
    """Images of several sizes replay one graph, in batches that it pads; what it does not hold runs uncaptured."""
    _, path, groups = seeing
    sizes = {"capture_sizes": [8, 32]} if compiler == "graph" else {}
    with open_runner(path, {"compiler": compiler, **sizes}) as runner:
        for group, expected in (*groups, *reversed(groups)):
            runner.forget()
            for found, wanted in zip(runner.encode(group), expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert runner.encoding_replays == (8 if compiler == "graph" else 0)  # 64 embeddings fit no graph
        assert runner.encoding_steps == 10


def test_configurations_that_do_not_fit_are_refused(seeing: tuple[Any, Path, list[Any]]) -> None:
    with pytest.raises(ConfigError, match="has capture_sizes, and its compiler is optimized"):
        open_runner(seeing[1], {"compiler": "optimized", "capture_sizes": [8]})
    with pytest.raises(ConfigError, match="unknown value 'piecewise'"):
        open_runner(seeing[1], {"compiler": "piecewise"})
