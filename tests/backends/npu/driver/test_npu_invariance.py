"""``numerics.invariant`` on the emulated NPU, whose kernels are called for one row at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.checkpoints import first_layers
from helpers.invariant import Model, texts
from helpers.thorough import MODE, thorough

import hal
from hal.errors import CaptureError, ConfigError

HYBRID = "tiny-python-hybrid"
CASES = [("tiny-python", "float16"), ("tiny-python", "bfloat16"), ("tiny-python-moe", "bfloat16"), (HYBRID, "float16")]


@thorough(MODE, "-python-(float16|bfloat16|hybrid)")
@pytest.mark.parametrize(("checkpoint", "dtype"), CASES)
def test_other_sequences_and_steps_change_no_bit(checkpoint: str, dtype: str, tmp_path: Path) -> None:
    """Also of experts, and of recurrent layers, whose tokens run one after the other."""
    folder = Path("checkpoints") / checkpoint
    if checkpoint != HYBRID:  # Its recurrent layers are not the first two alone.
        folder = first_layers(folder, tmp_path)
    model = Model(folder, texts(3, 4), ["eager", "piecewise"], backend="npu", dtype=dtype)
    assert sum(model.check(seed) for seed in range(4)) >= 4


def test_graphs_of_whole_steps_are_refused(trained: Path) -> None:
    with pytest.raises(CaptureError, match=r"calls paged_attention for each token"):
        Model(trained, texts(3, 1), ["graph"], backend="npu", dtype="float16")
    with pytest.raises(ConfigError, match=r"numerics\.invariant"):
        hal.open({"backend": "npu", "numerics": {"invariant": True}, "compilation": {"compiler": "npugraph_ex"}})
