"""Triton kernels on the emulated NPU, in processes in which Triton interprets."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.npu.processes import hal

pytest.importorskip("triton", reason="Triton is not installed, whose interpreter runs the kernels")

TRAINED = str(ROOT / "checkpoints" / "tiny-python")
TRITON = {"HAL_NPU_TRITON": "1", "TRITON_INTERPRET": "1"}


@pytest.mark.parametrize("compiler", ["eager", "graph"])
def test_the_tokens_are_those_without_triton(compiler: str) -> None:
    prompts = "--prompt", "def add(a, b):", "--prompt", "import"
    arguments = "generate", TRAINED, *prompts, "--max-new-tokens", "6", "--greedy", "--compiler", compiler, "--emulate"
    texts = [hal(*arguments, "--backend", "npu", **environ).stdout for environ in ({}, TRITON)]
    assert texts[0] == texts[1]


def test_heads_are_one_launch_of_a_layer(tmp_path: Path) -> None:
    """Of a captured step: their norms, the rotation and the cache write, which are four of CANN's."""
    command = (
        "generate",
        TRAINED,
        "--prompt",
        "import",
        "--max-new-tokens",
        "3",
        "--compiler",
        "graph",
        "--backend",
        "npu",
    )
    trace = tmp_path / "trace.json"
    hal("emulate", "--trace", str(trace), "--", sys.executable, "-m", "hal", *command, **TRITON)
    ran = [each for each in json.loads(trace.read_text(encoding="utf-8")) if each["ph"] == "X"]
    start = [each for each in ran if each["cat"] == "graph"][-1]["ts"]
    found = Counter(each["name"] for each in ran if each["args"]["phase"] == "replay" and each["ts"] >= start)
    assert found["split_qkv_rmsnorm_rope_cache"] == found["FusedInferAttentionScoreV3"] > 0
    assert not {"ApplyRotaryPosEmbV2", "ScatterPaKvCache"} & found.keys()


def test_triton_that_does_not_interpret_is_refused() -> None:
    found = hal("generate", TRAINED, "--prompt", "a", "--backend", "npu", "--emulate", code=2, HAL_NPU_TRITON="1")
    assert "set TRITON_INTERPRET=1 before Triton is imported" in found.stderr
