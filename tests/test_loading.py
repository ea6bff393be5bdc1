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
options = {"pack_weights": sys.argv[3] == "packed"}
backend = hal.open({"backend": "cpu", "dtype": sys.argv[2], "options": options})
before = backend.device.memory_stats().allocated
model = hal.load_model(sys.argv[1], backend)
projection = model.model.embed_tokens.projection
copy = 0 if projection is None else projection.numel() * projection.element_size()
print(backend.device.memory_stats().peak - before, sum(parameter.nbytes for parameter in model.parameters()), copy)
"""


@pytest.mark.parametrize("form", ["packed", "plain"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_memory(dtype: str, form: str, tmp_path: Path) -> None:
    random_checkpoint.write(tmp_path, torch.float32, num_hidden_layers=16)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), dtype, form]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, weights, copy = map(int, result.stdout.split())
    assert weights > 500e6, "much more than a file is mapped for at a time"
    assert copy in (0, 32000 * 1024 * (4 if dtype == "float32" else 2)), "the tied table, if packing it pays here"
    assert form == "packed" or not copy
    assert peak < 1.2 * weights + copy
