"""Tests for ``hal compare`` with the emulated NPU: it agrees with the CPU in every form, and finds injected faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from helpers.thorough import PROCESSES, thorough
from safetensors.torch import load_file
from torch import Tensor

import hal
from hal import ops
from hal.cli import main
from hal.compare.compare_backends import compare_backends
from hal.compare.saved_call import SavedCall
from hal.compare.texts import Prompts
from hal.ops.tolerance import assert_agree
from hal.quantize.quantize_checkpoint import quantize_checkpoint

PROMPTS = ("--prompt", "def read_lines(path):", "--prompt", "class Stack:", "--max-new-tokens", "5")
TEXT = "def read_lines(path):\n    with open(path) as file:\n        return file.read().splitlines()\n" * 8
NORM = "model.layers.1.self_attn.k_norm"

Opened = Callable[..., hal.Backend]

pytestmark = pytest.mark.usefixtures("one_thread")


def compared(*arguments: str | Path) -> list[dict[str, Any]]:
    result = CliRunner().invoke(main, ["compare", *map(str, arguments), *PROMPTS, "--json"])
    assert result.exit_code == 0, (result.output, result.stderr, result.exception)
    comparisons: list[dict[str, Any]] = json.loads(result.stdout)
    return comparisons


@pytest.mark.parametrize(("first", "second", "dtype"), [("cpu", "npu", "float16"), ("npu", "cpu", "bfloat16")])
def test_the_cpu(trained: Path, first: str, second: str, dtype: str) -> None:
    (found,) = compared(trained, "--backend", first, "--backend", second, "--emulate", "--dtype", dtype)
    assert found["broken"] is found["departure"] is None
    assert [row["operations"] for row in found["rows"]] == [5 * 12] * 2 + [5 * 5]
    assert any(row["worst"]["error"]["ratio"] > 0 for row in found["rows"])  # Their rounding does differ.


@thorough(PROCESSES)
@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_dynamic"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_int8_weights_that_only_the_npu_prepares(trained: Path, tmp_path: Path, scheme: Any, dtype: str) -> None:
    text = {"calibration": TEXT} if scheme == "w8a8" else {}
    quantized = quantize_checkpoint(trained, tmp_path / scheme, scheme, **text).path
    (found,) = compared(quantized, "--backend", "cpu", "--backend", "npu", "--emulate", "--dtype", dtype)
    assert [row["operations"] for row in found["rows"]] == [5 * 16] * 2 + [5 * 5]


def test_weights_and_caches_in_fractal_nz(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_NPU_NZ_WEIGHTS", "true")
    monkeypatch.setenv("HAL_NPU_NZ_CACHE", "true")
    (found,) = compared(trained, "--backend", "cpu", "--backend", "npu", "--emulate", "--dtype", "float16")
    assert len(found["not_compared"]) == 1
    assert found["not_compared"][0].startswith("store_kv_cache: cpu and npu have different cache")


def test_a_wrong_epsilon_and_its_replay(npu: Opened, trained: Path, tmp_path: Path) -> None:
    first, second = hal.open({"backend": "cpu", "dtype": "float16"}), npu(dtype="float16")
    weight, right = load_file(trained / "model.safetensors")[f"{NORM}.weight"].half(), second.kernels["rms_norm"]

    def rms_norm(x: Tensor, own: Tensor, eps: float) -> Tensor:
        result: Tensor = right(x, own, 0.1 if torch.equal(own.cpu(), weight) else eps)
        return result

    second.kernels = {**second.kernels, "rms_norm": rms_norm}  # type: ignore[assignment]
    found = compare_backends(trained, first, second, Prompts(((5, 6, 7, 8), (9, 10)), 3), save_to=tmp_path / "call")
    assert found.broken is not None
    assert (found.broken.call.operation, found.broken.call.path) == ("rms_norm", NORM)
    assert [row.worst is not None and row.worst.error.ratio > 1 for row in found.rows] == [0, 1, 0]
    call = SavedCall.load(tmp_path / "call")
    with torch.inference_mode():
        again = second.ops.rms_norm(*call.arguments("second", second.device.torch))
        healed = right(*call.arguments("second", second.device.torch))
    assert torch.equal(again.cpu(), call.results("second")["result"])
    assert_agree(ops.operation("rms_norm"), torch.float16, healed, call.results("first")["result"])
