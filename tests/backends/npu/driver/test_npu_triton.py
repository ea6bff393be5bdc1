"""Triton kernels on the emulated NPU, in processes in which Triton interprets."""

from __future__ import annotations

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


def test_triton_that_does_not_interpret_is_refused() -> None:
    found = hal("generate", TRAINED, "--prompt", "a", "--backend", "npu", "--emulate", code=1, HAL_NPU_TRITON="1")
    assert "set TRITON_INTERPRET=1 before Triton is imported" in found.stderr
