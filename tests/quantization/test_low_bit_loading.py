"""Tests of the memory that weights of 4 bits take while they are loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import large_checkpoint
from helpers.low_bits import Format, write
from helpers.quantized import PARTS
from helpers.thorough import EXHAUSTIVE, MODE, thorough
from safetensors.torch import load_file
from torch import Tensor

PROGRAM = """
import sys, hal
backend = hal.open({"backend": "cpu", "dtype": "bfloat16", "options": {"pack_weights": False}})
hal.load_model(sys.argv[1], backend)  # so that the modules that loading imports do not count
before = backend.device.memory_stats().allocated
model = hal.load_model(sys.argv[2], backend)
tensors = [*model.parameters(), *model.buffers()]
print(backend.device.memory_stats().peak - before, sum(tensor.nbytes for tensor in tensors))
"""
HALF = torch.float16
FORMATS = {
    "packed": Format("compressed-tensors", group=128, symmetric=True, dtype=HALF),
    "awq": Format("awq", group=128, dtype=HALF),
    "gptq": Format("gptq", group=128, dtype=HALF),
    "gptq-ordered": Format("gptq", group=128, dtype=HALF, ordered=True),
    "packed-ordered": Format("compressed-tensors", group=128, dtype=HALF, ordered=True),
}


def _written(folder: Path, name: str, *, layers: int) -> dict[str, Tensor]:
    """Write a quantized checkpoint, and return its tensors as they were before."""
    folder.mkdir()
    large_checkpoint.write(folder, torch.bfloat16, num_hidden_layers=layers, vocab_size=4096)
    plain, draw = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    found, alike = dict[str, Tensor](), dict[str, dict[str, Tensor]]()
    for full, tensor in plain.items():
        layer, _, suffix = full.rpartition(".")
        part = layer.rpartition(".")[2]
        if part not in PARTS or suffix != "weight":
            found[full] = tensor
            continue
        if part not in alike:
            alike[part] = FORMATS[name].quantized(tensor, draw)[0]
        found |= {f"{layer}.{each}": value.contiguous().clone() for each, value in alike[part].items()}
    write(folder, found, FORMATS[name].section())
    return plain


@thorough(EXHAUSTIVE, r"\[(packed|gptq|packed-ordered)\]")
@thorough(MODE, r"\[awq\]")
@pytest.mark.parametrize("name", FORMATS)
def test_no_more_than_a_layer_is_expanded(name: str, tmp_path: Path) -> None:
    """All weights in bfloat16 would take more than three times the memory."""
    small, large = tmp_path / "small", tmp_path / "large"
    _written(small, name, layers=1)
    plain = _written(large, name, layers=14)
    program = [sys.executable, "-c", PROGRAM, str(small), str(large)]
    result = subprocess.run(program, capture_output=True, text=True, check=True)
    peak, held = map(int, result.stdout.split())
    assert sum(each.nbytes for each in plain.values()) > 3 * held > 350e6
    assert peak < 1.15 * held
