"""Tests that unmodified code of torch for several devices, from its wheel, runs on emulated NPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.emulator.torchrun import environment, torchrun
from helpers.thorough import EXHAUSTIVE, PROCESSES, thorough

SCRIPTS = Path(__file__).parent / "scripts"
PAGE = ROOT / "docs" / "reference" / "emulated-cann.md"


@thorough(PROCESSES, r"\[4")
@thorough(EXHAUSTIVE, r"\[4")
@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallelism_and_functional_collectives(ranks: int) -> None:
    """DTensor's results are those of one device, and functional collectives give exact values."""
    torchrun(SCRIPTS / "torch_parallel.py", ranks)


OTHER_THAN_NCCL = "expects what only NCCL, or CUDA, has"
BROADCAST = "torch's broadcast reads the capability of a CUDA device, which torch_npu does not have"
PADDED = "wrong values: torch_npu pads sizes that are no multiple of 32 bytes, and another device is current"
PROFILER = "torch's profiler refuses the activities that `transfer_to_npu` gives it"
NO_CAPABILITY = "TypeError: 'NoneType' object is not subscriptable"
FAILS = {
    "test_all_gather_cuda": (PADDED, "AssertionError: Tensor-likes are not close!"),
    "test_all_gather_cuda_complex": (PADDED, "AssertionError: Tensor-likes are not close!"),
    "test_barrier_cuda": (BROADCAST, NO_CAPABILITY),
    "test_batch_isend_irecv_mixed_backend_err": (OTHER_THAN_NCCL, "RuntimeError: No backend type associated with"),
    "test_batch_isend_irecv_op_list_err": (OTHER_THAN_NCCL, "AttributeError: 'int' object has no attribute 'group'"),
    "test_broadcast_cuda": (BROADCAST, NO_CAPABILITY),
    "test_gather_cuda": (BROADCAST, NO_CAPABILITY),
    "test_gather_object": (BROADCAST, NO_CAPABILITY),
    "test_gather_object_subgroup": (BROADCAST, NO_CAPABILITY),
    "test_get_backend": (OTHER_THAN_NCCL, "AssertionError: String comparison failed: 'hccl' != 'nccl'"),
    "test_monitored_barrier_allreduce_hang": (OTHER_THAN_NCCL, "AssertionError: RuntimeError not raised"),
    "test_monitored_barrier_allreduce_hang_wait_all_ranks": (OTHER_THAN_NCCL, "AssertionError: RuntimeError not"),
    "test_nccl_backend_bool_broadcast": (BROADCAST, NO_CAPABILITY),
    "test_send_recv_nccl_autograd_profiler": (PROFILER, "TypeError: _prepare_profiler(): incompatible"),
}
"""Tests of torch that fail on NPUs, the reasons, and the starts of their errors. The page counts them."""


@thorough(PROCESSES)
def test_torchs_own_tests(tmp_path: Path) -> None:
    """Each passes, except those above. The page has the numbers. Some write files to the working directory."""
    command = [sys.executable, str(SCRIPTS / "torch_own_tests.py")]
    done = subprocess.run(
        command, env=environment(4), capture_output=True, text=True, timeout=1500, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    failed = {each["test"]: each["why"] for each in lines if each["result"] == "failed"}
    assert {name: why for name, why in failed.items() if name not in FAILS} == {}
    assert set(FAILS) - set(failed) == set(), "they pass now: remove them here, and change the page's count"
    others = {name: failed[name] for name, (_, start) in FAILS.items() if f"\n{start}" not in failed[name]}
    assert others == {}, "they fail for another reason"
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    counts = Counter(each["result"] for each in lines)
    assert f"{counts['passed']} pass, torch skips {counts['skipped']}, and {counts['failed']} fail" in text
