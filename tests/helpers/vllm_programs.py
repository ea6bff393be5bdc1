"""Runs programs with vLLM in separate processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import TESTS
from helpers.distributions import installed

needs_vllm = pytest.mark.skipif(not installed("vllm"), reason="vLLM is not installed: see make test-vllm")
PROGRAMS = TESTS / "engines"
ENVIRONMENT = {"HAL_VLLM": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
IN_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}


def python(devices: int = 1) -> list[str]:
    """Return the command of Python, on the emulated CANN if torch_npu is installed: transformers imports it then."""
    emulated = installed("torch-npu")
    prefix = [sys.executable, "-m", "hal_command", "emulate", "--devices", str(devices), "--"] if emulated else []
    return [*prefix, sys.executable]


def run(program: str, *arguments: str, devices: int = 1) -> subprocess.CompletedProcess[str]:
    """Run a program with vLLM."""
    command = [*python(devices), "-c", program, *arguments]
    paths = os.pathsep.join(filter(None, (str(PROGRAMS), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **ENVIRONMENT, **IN_ONE_PROCESS, "PYTHONPATH": paths}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)


def found_by(program: str, tmp_path: Path, checkpoint: Path, *, devices: int = 1, **asked: Any) -> dict[str, Any]:
    """Run ``module.function`` of this folder, and return what it found."""
    out, module = tmp_path / "found.json", program.partition(".")[0]
    arguments = json.dumps({"checkpoint": str(checkpoint), "out": str(out), **asked})
    result = run(f"import {module}; {program}()", arguments, devices=devices)
    assert out.exists(), result.stdout + result.stderr
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    print(asked, found)  # noqa: T201
    return found
