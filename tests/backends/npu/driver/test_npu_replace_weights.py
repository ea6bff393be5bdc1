"""Tests of weights that are replaced under graphs of an NPU, also in FRACTAL_NZ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.replacing import generated, logits, tensors, two_checkpoints
from helpers.thorough import EXHAUSTIVE, MODE, thorough

import hal

Opened = Callable[..., hal.Backend]
SIZES = {
    "head_dim": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


OTHERS = (
    ("tied", "eager", False),
    ("tied", "graph", False),
    ("biased", "npugraph_ex", True),
    ("experts", "graph", True),
    ("compressed-tensors/w8a8_dynamic", "graph", True),
    ("modelslim/w8a16", "graph", True),
    ("modelslim/w8a8_dynamic/experts", "graph", True),
)


@thorough(MODE, r"\[compressed-tensors/w8a8-npugraph_ex-True")
@thorough(EXHAUSTIVE, r"\[(tied-eager|modelslim/w8a16)")
@pytest.mark.parametrize(
    ("kind", "compiler", "nz"),
    [
        ("tied", "graph", True),
        ("compressed-tensors/w8a8", "npugraph_ex", True),
        *(pytest.param(*each, marks=pytest.mark.thorough(MODE)) for each in OTHERS),
    ],
)
def test_results_are_those_of_a_fresh_load(npu: Opened, tmp_path: Path, kind: str, compiler: str, nz: bool) -> None:
    first, second = two_checkpoints(tmp_path, kind, **SIZES)

    def runner_of(folder: Path) -> hal.Runner:
        compilation = {} if compiler == "eager" else {"capture_sizes": [1, 2, 4], "debug": True}
        backend = npu(
            dtype="float16",
            compilation={"compiler": compiler, **compilation},
            options={"nz_weights": nz},
            cache={"num_tokens": 2048},
        )
        return hal.Runner(hal.load_model(folder, backend), backend)

    with runner_of(second) as fresh:
        expected, wanted = logits(fresh), generated(fresh)
    with runner_of(first) as runner:
        assert not torch.allclose(logits(runner), expected, atol=0.1)
        hal.replace_weights(runner, tensors(second))
        assert torch.equal(logits(runner), expected)
        assert generated(runner) == wanted
