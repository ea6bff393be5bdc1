"""Tests for other products and releases of CANN, which accept other arguments, and for which torch_npu calls others."""

from __future__ import annotations

import pytest
from helpers.thorough import MODE, thorough
from support.children import on_soc

ON_A_950 = """
import emulated_cann
import torch, torch_npu
from torch.nn.functional import scaled_dot_product_attention as attend

torch.manual_seed(0)
query, key, value = (torch.randn(2, 4, length, 64, dtype=torch.half) for length in (5, 9, 9))
on_npu = [each.npu() for each in (query, key, value)]
with torch.no_grad(), emulated_cann.trace() as trace:
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
with emulated_cann.faults.execution("Adds"):  # torch_npu then asks the device what is to be repaired
    fails("Adds: fault injected by emulated_cann.faults", lambda: on_npu[0] + 1)
print("well")
"""


def test_attention_and_errors_on_a_950(clean: dict[str, str]) -> None:
    """Where torch_npu calls only aclnn functions."""
    assert on_soc("Ascend950PR_9599", ON_A_950, clean) == "well\n"


PACKED = """
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
@thorough(MODE)
@pytest.mark.parametrize(
    ("version", "soc", "taken"),
    [("8.5.0", "Ascend910B3", BEFORE_9), ("9.0.0", "Ascend910_9391", "True; True; True")],
    ids=["8.5.0", "9.0.0"],
)
def test_what_a_packed_attention_takes(clean: dict[str, str], version: str, soc: str, taken: str) -> None:
    """The sources are in attention_plan.cpp."""
    printed = on_soc(soc, PACKED, clean, version=version)
    assert printed.splitlines() == ["True; True", taken]
