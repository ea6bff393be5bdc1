"""Loading takes little more memory than the weights, whatever they are converted to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import random_checkpoint

PROGRAM = """
import sys, hal, hal.models.qwen3, hal.runtime.loading
backend = hal.open({"backend": "cpu", "dtype": sys.argv[2]})
before = backend.device.memory_stats().allocated
model = hal.load_model(sys.argv[1], backend)
print(backend.device.memory_stats().peak - before, sum(parameter.nbytes for parameter in model.parameters()))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_memory(dtype: str, tmp_path: Path) -> None:
    random_checkpoint.write(tmp_path, torch.float32, num_hidden_layers=16)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), dtype]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, weights = map(int, result.stdout.split())
    assert weights > 500e6, "much more than a file is mapped for at a time"
    assert peak < 1.2 * weights
