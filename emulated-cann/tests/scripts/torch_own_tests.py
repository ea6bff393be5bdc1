"""torch's own tests of torch.distributed, unmodified from torch's wheel, on NPUs.

    emulated-cann run --devices 4 -- python torch_own_tests.py [TEST]...

torch_npu's `transfer_to_npu` lets programs for CUDA and NCCL use NPUs and HCCL. Each test runs in a process per rank.
Prints a line of JSON per test: its name, `passed`, `skipped` or `failed`, and why.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import unittest
from collections.abc import Callable
from typing import Any

RANKS = int(os.environ.get("RANKS", "4"))
TRAINING = re.compile(
    r"ddp|DDP|DistributedDataParallel|SyncBatchNorm|sync_bn|[aA]verag|localSGD|bucket|compute_limits|static_graph|gradient"
    r"|grad_parity|get_future|DistributedSampler|data_parallel|different_graph|unused|verify_model|immutability|mb_to_bytes"
    r"|grads_same"
)
"""Tests of training with replicas, which are not run."""
os.environ.update(
    BACKEND="nccl", WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo", HCCL_EXEC_TIMEOUT="30"
)

import torch_npu  # noqa: E402, F401
from torch.testing._internal.common_distributed import skip_if_no_gpu  # noqa: E402

# After common_distributed, which would ask for the version of NCCL.
from torch_npu.contrib import transfer_to_npu  # noqa: E402, F401  # isort: skip
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend  # noqa: E402  # isort: skip

TESTS = DistributedTest._DistTestBase
SKIPPING = skip_if_no_gpu(sys.exit).__code__
GPU_TESTS = {
    name: each.__wrapped__
    for name, each in vars(TESTS).items()
    if getattr(each, "__code__", None) is SKIPPING and not hasattr(each, "__unittest_skip__")
}
"""The tests that torch skips without GPUs. It looked for GPUs before transfer_to_npu offered NPUs in their place."""


class OnNpus(type("GpuTests", (), GPU_TESTS), TestDistBackend, TESTS):  # type: ignore[misc]
    """All tests, as torch's file test_distributed_spawn.py runs them, but in forked processes, which start at once."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(multiprocessing.get_context("fork").Process)

    def call_dist_op(
        self,
        postfix: str,
        is_async: bool,
        op: Callable[..., Any],
        *args: Any,
        secondary_op_call: Any = None,
        expect_event: bool = True,
        profile_cuda: bool = False,
        tensor_shapes: Any = None,
        **kwargs: Any,
    ) -> None:
        """Call without torch's profiler, which refuses the activities that transfer_to_npu gives it.

        torch would check what the profiler recorded only for other backends.
        """
        calls = [lambda: op(*args, **kwargs), *([secondary_op_call] if secondary_op_call else [])]
        works = [call() for call in calls]
        if is_async:
            for work in works:
                work.wait()


class Lines(unittest.TestResult):
    """Prints the result of each test."""

    def _line(self, test: unittest.TestCase, result: str, why: str = "") -> None:
        sys.stdout.write(json.dumps({"test": test.id().rpartition(".")[2], "result": result, "why": why}) + "\n")
        sys.stdout.flush()

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802 (of unittest)
        super().addSuccess(test)
        self._line(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802 (of unittest)
        super().addSkip(test, reason)
        self._line(test, "skipped", reason)

    def addError(self, test: unittest.TestCase, error: Any) -> None:  # noqa: N802 (of unittest)
        super().addError(test, error)
        self._line(test, "failed", self._exc_info_to_string(error, test)[-1500:])

    def addFailure(self, test: unittest.TestCase, error: Any) -> None:  # noqa: N802 (of unittest)
        super().addFailure(test, error)
        self._line(test, "failed", self._exc_info_to_string(error, test)[-1500:])


def main(names: list[str]) -> None:
    loader = unittest.TestLoader()
    chosen = names or [name for name in loader.getTestCaseNames(OnNpus) if not TRAINING.search(name)]
    suite = unittest.TestSuite(map(OnNpus, chosen))
    suite.run(Lines())


if __name__ == "__main__":
    main(sys.argv[1:])
