"""Tests that a model whose index pools groups of tokens gives the CPU's logits on the emulated NPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import published_configs, toys
from helpers.thorough import EXHAUSTIVE, MODE, thorough
from torch import Tensor

import hal

Opened = Callable[..., hal.Backend]
pytestmark = pytest.mark.usefixtures("one_thread")


def logits(folder: Path, backend: hal.Backend, schedule: toys.Schedule) -> Tensor:
    """Return the logits of a schedule, ``[steps, vocab_size]``."""
    runner = hal.Runner(hal.load_model(folder, backend), backend)
    return torch.stack([each.clone() for _, _, each in toys.scheduled(runner, schedule, "")])


@thorough(MODE, r"\[(graph|piecewise)")
@thorough(EXHAUSTIVE, r"\[npugraph")
@pytest.mark.parametrize("mode", ["eager", "graph", "piecewise", "npugraph_ex"])
def test_batches_that_change(npu: Opened, mode: str, tmp_path: Path) -> None:
    """The NPU's logits in float16 differ from float32 about as much as the CPU's do."""
    folder = published_configs.write(tmp_path / "model", "GLM-5.3-Flash")
    schedule = toys.Schedule.drawn(3, 96, count=4)
    cache = {"num_tokens": 9 * 128, "block_size": 128, "num_sequences": toys.SLOTS}
    compilation: dict[str, Any] = {"compiler": mode}
    if mode.startswith("piecewise"):
        compilation["prefill"] = {"capture_sizes": [8, 24]}
    if mode != "eager":
        compilation["capture_sizes"] = [1, 3]
    exact, rounded = (
        logits(folder, hal.open({"backend": "cpu", "dtype": dtype, "cache": cache}), schedule)
        for dtype in ("float32", "float16")
    )
    found = logits(folder, npu(compilation=compilation, cache=cache, dtype="float16"), schedule)
    assert (found - exact).norm() <= 2 * (rounded - exact).norm()
