"""Tests of the ways in which an encoder's steps run: captured, uncaptured, and compiled by Inductor."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from helpers.seeing import build, item
from helpers.thorough import EXHAUSTIVE, LONG, thorough

import hal
from hal.errors import CompileError, ConfigError
from hal.execution.context import FormContext


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


@thorough(EXHAUSTIVE, r"\[Qwen3VL")
def test_configurations_that_do_not_fit_are_refused(seeing: tuple[Any, Path, list[Any]]) -> None:
    with pytest.raises(ConfigError, match="has capture_sizes, and its compiler is optimized"):
        open_runner(seeing[1], {"compiler": "optimized", "capture_sizes": [8]})
    with pytest.raises(ConfigError, match="unknown value 'piecewise'"):
        open_runner(seeing[1], {"compiler": "piecewise"})


@thorough(EXHAUSTIVE, r"\[Qwen3VL")
@pytest.mark.parametrize("compiler", ["graph", "optimized"])
def test_what_cannot_be_traced(
    compiler: str, seeing: tuple[Any, Path, list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """``on_capture_error`` says what follows, as for the model's own steps: an error, or the encoder's Python code."""
    _, path, ((group, expected), *_) = seeing
    compilation = {"encoder": {"compiler": compiler}}
    for setting in ("raise", "eager"):
        backend = hal.open(
            {"backend": "cpu", "dtype": "float32", "compilation": {**compilation, "on_capture_error": setting}}
        )
        model: Any = hal.load_model(path, backend)
        forward = model.encoder.forward
        model.encoder.forward = lambda batch, forward=forward: (
            forward(batch) * (1 if batch.query_start_loc[0] >= 0 else 2)
        )
        if setting == "raise":
            with backend, pytest.raises(CompileError, match="cannot be traced"):
                hal.Runner(model, backend).encode(group)
            continue
        with backend, hal.Runner(model, backend) as runner:
            for found, wanted in zip(runner.encode(group), expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
            assert runner.encoding_replays == 0
        assert ("encoder batches run uncaptured" in caplog.text) == (compiler == "graph")
        assert caplog.text.count("steps that no graph holds run the Python code of") == 1


@thorough(EXHAUSTIVE, r"\[Qwen3VL")
def test_graphs_are_those_of_all_ranks(seeing: tuple[Any, Path, list[Any]]) -> None:
    with open_runner(seeing[1], {}) as runner:
        sizes = attrs.evolve(runner.backend.config.compilation.of("encoder"), capture_sizes=(8,))
        for setting, other_rank in (("raise", False), ("eager", True), ("eager", False)):
            config = attrs.evolve(sizes, on_capture_error=setting)
            context = FormContext(
                runner.model,
                runner.backend,
                runner.states,
                config,
                "encoder",
                None,
                64,
                lambda yes, other_rank=other_rank: yes and other_rank,
            )
            form = runner.backend.compiler("graph").make(context)
            assert len(form.shapes) == (setting == "raise" or other_rank)  # type: ignore[attr-defined]
            form.close()
