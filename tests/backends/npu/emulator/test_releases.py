"""Tests for arguments that operations accept in some CANN releases only, according to the documentation of each."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers.thorough import MODE, thorough

SCRIPT = """
import torch, torch_npu

def attend(dtype, dim, heads=4, kv_heads=2):
    query = torch.ones(5, heads, dim, dtype=dtype, device="npu")
    keys = torch.ones(9, kv_heads, dim, dtype=dtype, device="npu")
    try:
        output, _ = torch_npu.npu_fused_infer_attention_score(
            query, keys, keys, num_heads=heads, num_key_value_heads=kv_heads, scale=1.0, input_layout="TND",
            actual_seq_lengths=[2, 5], actual_seq_lengths_kv=[4, 9],
        )
        torch.npu.synchronize()
        return (output == 1).all().item()
    except RuntimeError as error:
        return next(why for why in ("must be bfloat16 before CANN 9", "64 or 128 before CANN 9") if why in str(error))

print(attend(torch.bfloat16, 128), attend(torch.bfloat16, 192, 4, 4), sep="; ")
print(attend(torch.float16, 128), attend(torch.bfloat16, 256), attend(torch.bfloat16, 192), sep="; ")
"""

BEFORE_9 = "must be bfloat16 before CANN 9; 64 or 128 before CANN 9; 64 or 128 before CANN 9"


# The other tests of attention run on an A2 with CANN 9.1.0.
@thorough(MODE, r"\[8\.5\.0")
@pytest.mark.parametrize(
    ("version", "soc", "taken"),
    [("8.5.0", "Ascend910B3", BEFORE_9), ("9.0.0", "Ascend910_9391", "True; True; True")],
    ids=["8.5.0", "9.0.0"],
)
def test_what_a_packed_attention_takes(clean: dict[str, str], version: str, soc: str, taken: str) -> None:
    """The sources are in attention_plan.cpp."""
    command = [sys.executable, "-c", "from hal.cli import main; main(prog_name='hal')"]
    command += ["emulate", "--soc", soc, "--version", version, "--", sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ["True; True", taken], done.stderr
