"""Tests that the trained model of pictures answers on the emulated NPU as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.pictures import CHECKPOINT, RIGHT, answers, opened, questions, right
from helpers.thorough import EXHAUSTIVE, thorough

from hal.quantize.quantize_checkpoint import quantize_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


def answered(count: int, mode: str, backend: str, path: Path = CHECKPOINT) -> list[str]:
    with opened(mode, path, backend=backend, dtype="bfloat16") as runner:
        return answers(runner, questions(count))


def test_answers() -> None:
    """One of each kind, in captured steps."""
    assert right(answered(5, "graph", "npu")) == 5


@thorough(EXHAUSTIVE)
@pytest.mark.parametrize("scheme", ["none", "w8a8_dynamic"])
@pytest.mark.parametrize("mode", ["eager", "graph", "piecewise"])
def test_300_pictures(mode: str, scheme: str, tmp_path: Path) -> None:
    path = CHECKPOINT
    if scheme != "none":
        path = tmp_path / scheme
        quantize_checkpoint(CHECKPOINT, path, scheme)
    expected, found = (right(answered(300, mode, backend, path)) for backend in ("cpu", "npu"))
    assert found >= RIGHT * 300
    assert abs(expected - found) <= 3
