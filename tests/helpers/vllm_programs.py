"""Runs programs with vLLM in separate processes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from helpers import TESTS
from helpers.distributions import installed

needs_vllm = pytest.mark.skipif(not installed("vllm"), reason="vLLM is not installed: see make test-vllm")
PROGRAMS = TESTS / "engines"
ENVIRONMENT = {"HAL_VLLM": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
RUNNERS = {
    1: {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    # vLLM refuses its second model runner where Triton has no device, unless no GPU is visible.
    2: {"VLLM_USE_V2_MODEL_RUNNER": "1", "CUDA_VISIBLE_DEVICES": ""},
}
"""What makes vLLM schedule for its first or second model runner."""
IN_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}


def vllm_version() -> Version:
    """Return the version of vLLM that is installed."""
    return Version(importlib.metadata.version("vllm"))


def python(devices: int = 1) -> list[str]:
    """Return the command of Python, on the emulated CANN if torch_npu is installed: transformers imports it then."""
    emulated = installed("torch-npu")
    prefix = [sys.executable, "-m", "hal_command", "emulate", "--devices", str(devices), "--"] if emulated else []
    return [*prefix, sys.executable]


def run(program: str, *arguments: str, devices: int = 1, runner: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program with vLLM, which schedules for one of its model runners, or for that of the environment."""
    command = [*python(devices), "-c", program, *arguments]
    paths = os.pathsep.join(filter(None, (str(PROGRAMS), os.environ.get("PYTHONPATH"))))
    chosen = {} if runner is None else RUNNERS[runner]
    environment = {**os.environ, **ENVIRONMENT, **IN_ONE_PROCESS, **chosen, "PYTHONPATH": paths}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)


def found_by(
    program: str, tmp_path: Path, checkpoint: Path, *, devices: int = 1, runner: int | None = None, **asked: Any
) -> dict[str, Any]:
    """Run ``module.function`` of this folder, and return what it found."""
    out, module = tmp_path / "found.json", program.partition(".")[0]
    arguments = json.dumps({"checkpoint": str(checkpoint), "out": str(out), **asked})
    result = run(f"import {module}; {program}()", arguments, devices=devices, runner=runner)
    assert out.exists(), result.stdout + result.stderr
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    print(asked, found)  # noqa: T201
    return found
