"""Tests for torch_npu on an Ascend950, where it calls only aclnn functions, and different ones."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from hal.backends.npu import emulator
import torch, torch_npu
from torch.nn.functional import scaled_dot_product_attention as attend

torch.manual_seed(0)
query, key, value = (torch.randn(2, 4, length, 64, dtype=torch.half) for length in (5, 9, 9))
on_npu = [each.npu() for each in (query, key, value)]
with torch.no_grad(), emulator.trace() as trace:
    dense = attend(*on_npu)
    packed = [each.transpose(1, 2).reshape(-1, 4, 64) for each in on_npu]
    ends = {"actual_seq_qlen": [5, 10], "actual_seq_kvlen": [9, 18]}
    tnd, *_ = torch_npu.npu_fusion_attention(*packed, 4, "TND", scale=0.125, **ends)
expected = attend(query.float(), key.float(), value.float())
torch.testing.assert_close(dense.cpu().float(), expected, rtol=2e-3, atol=2e-3)
torch.testing.assert_close(tnd.cpu().view(2, 5, 4, 64).transpose(1, 2).float(), expected, rtol=2e-3, atol=2e-3)
assert trace.counts()["FlashAttentionScoreV4"] == 2, trace.counts()

def fails(word, body):
    try:
        body()
        torch.npu.synchronize()
    except RuntimeError as error:
        assert word in str(error), error
    else:
        raise AssertionError(f"{word} was expected")
    assert (on_npu[0] + 1).isfinite().all().item()

fails("only support aclnn", lambda: torch_npu.npu_silu(on_npu[0]))
with emulator.faults.execution("Adds"):  # torch_npu then asks the device what is to be repaired
    fails("Adds: fault injected by emulator.faults", lambda: on_npu[0] + 1)
print("well")
"""


def test_attention_and_errors(clean: dict[str, str]) -> None:
    command = [sys.executable, "-c", "from hal.cli import main; main(prog_name='hal')"]
    command += ["emulate", "--soc", "Ascend950PR_9599", "--", sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "well\n", done.stderr
