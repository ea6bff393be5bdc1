"""``numerics.invariant`` on the emulated NPU, whose kernels are called for one row at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.invariant import Model, texts

import hal
from hal.errors import CaptureError, ConfigError


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_sequences_and_steps_change_no_bit(trained: Path, dtype: str) -> None:
    model = Model(trained, texts(3, 4), ["eager", "piecewise"], backend="npu", dtype=dtype)
    assert sum(model.check(seed) for seed in range(6)) >= 6


def test_graphs_of_whole_steps_are_refused(trained: Path) -> None:
    with pytest.raises(CaptureError, match=r"calls paged_attention for each token"):
        Model(trained, texts(3, 1), ["graph"], backend="npu", dtype="float16")
    with pytest.raises(ConfigError, match=r"numerics\.invariant"):
        hal.open({"backend": "npu", "numerics": {"invariant": True}, "compilation": {"compiler": "npugraph_ex"}})
