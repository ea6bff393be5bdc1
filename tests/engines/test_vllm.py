"""Tests of hal inside vLLM. Most need vLLM: `make test-vllm` runs them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hal.config.environment import environment_mapping
from hal.engines.vllm import register


def _installed(distribution: str) -> bool:
    """Return whether a distribution is installed. Tests of the core hide torch_npu from imports."""
    try:
        return bool(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return False


needs_vllm = pytest.mark.skipif(not _installed("vllm"), reason="vLLM is not installed: see make test-vllm")
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
    emulated = _installed("torch-npu")
    prefix = [sys.executable, "-m", "hal_command", "emulate", "--"] if emulated else []
    command = [*prefix, sys.executable, "-c", program, *arguments]
    paths = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": paths}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)


def compared(tmp_path: Path, checkpoint: Path, **asked: Any) -> dict[str, Any]:
    out = tmp_path / "found.json"
    arguments = json.dumps({"checkpoint": str(checkpoint), "out": str(out), **asked})
    result = run("import vllm_requests; vllm_requests.main()", arguments)
    assert out.exists(), result.stdout + result.stderr
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    print(asked, found["counts"], f"ties: {found['ties']}")  # noqa: T201
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
    if device == "npu" and not _installed("torch-npu"):
        pytest.skip("torch_npu is not installed")
    found = compared(
        tmp_path, request.getfixturevalue(name), hal={"backend": device, "compilation": {"compiler": compiler}},
        dtype=dtype, block=16 if device == "cpu" else 128, seed=1, requests=requests,
    )  # fmt: skip
    assert found["wrong"] == []
    assert len(found["ties"]) <= (0 if dtype == "float32" else requests // 20)
    assert found["requests"] == requests
    assert all(found["counts"][kind] > 0 for kind in ("mixed", "decode", "chunks", "resumed", "prefix hits"))


@needs_vllm
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("enable_lora=True", "hal does not support vLLM's lora_config"),
        ("pipeline_parallel_size=2", "hal does not support vLLM's pipeline_parallel_size = 2"),
        ("tensor_parallel_size=2", "hal does not support vLLM's tensor_parallel_size = 2"),
        ("kv_cache_dtype='fp8'", "hal does not support vLLM's kv_cache_dtype = fp8"),
        (
            "enforce_eager=True, additional_config={'hal': {'compilation': {'compiler': 'graph'}}}",
            "enforce_eager is set",
        ),
        ("load_format='dummy'", "hal loads no dummy weights"),
        ("additional_config={'hal': {'backend': 'cpu', 'compilr': 1}}", "compilr"),
    ],
)
def test_what_is_refused_at_the_start(trained: Path, arguments: str, problem: str) -> None:
    result = run(f"from vllm import LLM; LLM(model={str(trained)!r}, max_model_len=64, {arguments})")
    assert result.returncode != 0
    assert problem in result.stdout + result.stderr
