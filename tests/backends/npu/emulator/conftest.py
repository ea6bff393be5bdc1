"""What the tests of the emulated CANN share, which tests/conftest.py puts under torch_npu."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hal.backends.npu.emulator import activation
from torch._functorch import config as functorch_config

# npugraph_ex has the attention write into a given output and return it, which torch takes for an error if CI is set in
# the environment, and for a warning elsewhere. Here and in the processes that tests start, it is a warning everywhere.
os.environ["TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING"] = "0"
functorch_config.error_on_custom_op_aliasing = False


@pytest.fixture(autouse=True)
def _on_the_default_stream() -> Iterator[None]:
    """Set the current streams back: torch_npu leaves that of a capture behind whose end is refused.

    Streams are from a pool of 32, so a later test would get the same one as a side stream, and wait there for what it
    puts behind its wait.
    """
    yield
    for device in (1, 0):
        with torch.npu.device(device):
            torch.npu.set_stream(torch.npu.default_stream())


@pytest.fixture
def clean() -> dict[str, str]:
    """The environment of a process that no emulated CANN was put under."""
    ours = {activation.SWITCH, activation.OPTIONS, "LD_LIBRARY_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    environ = {name: value for name, value in os.environ.items() if name not in ours}
    return {**environ, "PYTHONSAFEPATH": "1"}  # as for an installed command: the current folder is not on the path
