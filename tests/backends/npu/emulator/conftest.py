"""Fixtures for tests of the emulated CANN, which tests/conftest.py loads for torch_npu."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hal.backends.npu.emulator import activation
from torch._functorch import config as functorch_config

# npugraph_ex has the attention write into a given output and return it. torch reports that as an error if CI is set in
# the environment, and as a warning otherwise. In these tests and their subprocesses it is always a warning.
os.environ["TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING"] = "0"
functorch_config.error_on_custom_op_aliasing = False


@pytest.fixture(autouse=True)
def _on_the_default_stream() -> Iterator[None]:
    """Reset the current streams: if the end of a capture fails, torch_npu leaves its stream current.

    Streams come from a pool of 32, so a later test could get the same stream as a side stream and deadlock on it.
    """
    yield
    if "torch_npu" not in sys.modules:
        return  # No test of this process has used a stream yet.
    for device in (1, 0):
        with torch.npu.device(device):
            torch.npu.set_stream(torch.npu.default_stream())


@pytest.fixture
def internal_formats() -> Iterator[None]:
    """Allow internal formats; otherwise torch_npu silently ignores casts to FRACTAL_NZ."""
    torch.npu.config.allow_internal_format = True
    yield
    torch.npu.config.allow_internal_format = False


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Any]]:
    """Return two ranks of a communicator, the devices of this process."""
    from helpers.emulator.device_ranks import hccl, two_ranks  # needs the emulated CANN

    found = two_ranks()
    yield found
    for each in found:
        each.destroy()
    hccl.cann.aclrtSetDevice(0)


@pytest.fixture
def clean() -> dict[str, str]:
    """Return the environment of a process without the emulated CANN."""
    ours = {activation.SWITCH, activation.OPTIONS, "LD_LIBRARY_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    environ = {name: value for name, value in os.environ.items() if name not in ours}
    return {**environ, "PYTHONSAFEPATH": "1"}  # An installed command does not have the current folder on the path.
