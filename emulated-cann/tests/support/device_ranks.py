"""Ranks that are devices of the test's own process, for operations that compute and communicate."""

from __future__ import annotations

import sys

import pytest
import torch

from support import TESTS

sys.path.insert(0, str(TESTS / "scripts"))

import hccl


def two_ranks() -> list[hccl.Communicator]:
    """Create a communicator of two devices, whose calls wait for at most 30 s."""
    device = torch.npu.current_device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HCCL_EXEC_TIMEOUT", "30")
        found = hccl.of_devices([0, 1])
    hccl.cann.aclrtSetDevice(device)  # torch_npu remembers the device that it set last
    return found
