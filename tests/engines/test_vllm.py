"""Tests of hal inside vLLM. Most need vLLM: `make test-vllm` runs them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hal.config.environment import environment_mapping
from hal.engines.vllm import register

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: see make test-vllm"
)
HERE = Path(__file__).parent
ENVIRONMENT = {
    "HAL_VLLM": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "VLLM_LOGGING_LEVEL": "WARNING",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "active"),
    [({}, False), ({"HAL_VLLM": "1"}, True), ({"HAL_VLLM": "0"}, False), ({"VLLM_PLUGINS": "hal"}, True),
     ({"VLLM_PLUGINS": "other,hal"}, True), ({"VLLM_PLUGINS": "other"}, False)],
)  # fmt: skip
def test_hal_is_active_only_if_asked_for(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], active: bool
) -> None:
    for name in ("HAL_VLLM", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert "vllm" not in environment_mapping()
    assert register() == ("hal.engines.vllm.platform.HalPlatform" if active else None)


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program with vLLM, on the emulated CANN if torch_npu is installed: transformers imports it then."""
    emulated = importlib.util.find_spec("torch_npu") is not None
    prefix = [sys.executable, "-m", "hal_command", "emulate", "--"] if emulated else []
    command, environment = [*prefix, sys.executable, "-c", program, *arguments], {**os.environ, **ENVIRONMENT}
    return subprocess.run(
        command, env={**environment, "PYTHONPATH": str(HERE)}, capture_output=True, text=True, timeout=1500, check=False
    )


def compared(tmp_path: Path, checkpoint: Path, **asked: Any) -> dict[str, Any]:
    out = tmp_path / "found.json"
    arguments = json.dumps({"checkpoint": str(checkpoint), "out": str(out), **asked})
    result = run("import vllm_requests; vllm_requests.main()", arguments)
    assert out.exists(), result.stdout + result.stderr
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    print(asked, found["counts"])  # noqa: T201
    return found


@needs_vllm
@pytest.mark.parametrize(
    ("name", "device", "compiler", "dtype", "requests"),
    [
        ("trained", "cpu", "eager", "float32", 200),
        ("trained", "cpu", "graph", "float32", 200),
        ("trained", "cpu", "piecewise", "float32", 200),
        ("trained_experts", "cpu", "graph", "float32", 60),
        ("trained", "npu", "eager", "float16", 40),
        ("trained", "npu", "graph", "float16", 200),
        ("trained", "npu", "piecewise", "float16", 40),
        ("trained", "npu", "npugraph_ex", "float16", 40),
    ],
)
def test_random_requests_get_the_tokens_of_generate(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, device: str, compiler: str, dtype: str, requests: int
) -> None:
    """A small cache and small steps, so that requests are cut into chunks, resumed, and find cached prefixes."""
    if device == "npu" and importlib.util.find_spec("torch_npu") is None:
        pytest.skip("torch_npu is not installed")
    found = compared(
        tmp_path, request.getfixturevalue(name), hal={"backend": device, "compilation": {"compiler": compiler}},
        dtype=dtype, block=16 if device == "cpu" else 128, seed=1, requests=requests,
    )  # fmt: skip
    assert found["wrong"] == []
    assert found["requests"] == requests
    assert all(found["counts"][kind] > 0 for kind in ("mixed", "decode", "chunks", "resumed", "prefix hits"))


@needs_vllm
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("enable_lora=True", "hal does not support vLLM's lora_config"),
        ("pipeline_parallel_size=2", "hal does not support pipeline parallelism"),
        ("load_format='dummy'", "hal loads no dummy weights"),
        ("additional_config={'hal': {'backend': 'cpu', 'compilr': 1}}", "compilr"),
    ],
)
def test_what_is_refused_at_the_start(trained: Path, arguments: str, problem: str) -> None:
    result = run(f"from vllm import LLM; LLM(model={str(trained)!r}, max_model_len=64, {arguments})")
    assert result.returncode != 0
    assert problem in result.stdout + result.stderr
