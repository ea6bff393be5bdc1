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
import sys, hal, hal.models.qwen3, hal.checkpoint.loading, stevedore.driver
from hal.quantization import awq, compressed_tensors, gptq
backend = hal.open({"backend": "cpu", "dtype": "bfloat16", "options": {"pack_weights": False}})
before = backend.device.memory_stats().allocated
model = hal.load_model(sys.argv[1], backend)
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


@thorough(EXHAUSTIVE, r"\[(packed|gptq|packed-ordered)\]")
@thorough(MODE, r"\[awq\]")
@pytest.mark.parametrize("name", FORMATS)
def test_no_more_than_a_layer_is_expanded(name: str, tmp_path: Path) -> None:
    """All weights in bfloat16 would take more than three times the memory."""
    large_checkpoint.write(tmp_path, torch.bfloat16, num_hidden_layers=14, vocab_size=4096)
    plain, draw = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(1)
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
    write(tmp_path, found, FORMATS[name].section())
    result = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True)
    peak, held = map(int, result.stdout.split())
    assert sum(each.nbytes for each in plain.values()) > 3 * held > 350e6
    assert peak < 1.15 * held
