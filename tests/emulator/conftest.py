"""The emulated CANN, under the real torch_npu, for every test of this folder, which runs in a process of its own."""

from __future__ import annotations

import os
import sys

import pytest
from hal.backends.npu import emulator
from hal.backends.npu.emulator import activation

if sys.modules.get("torch_npu", ...) is None:  # hidden by the conftest.py above this one
    del sys.modules["torch_npu"]
emulator.activate(devices=2)

import torch_npu  # noqa: E402, F401
from torch._functorch import config as functorch_config  # noqa: E402

# npugraph_ex has the attention write into a given output and return it, which torch takes for an error if CI is set in
# the environment, and for a warning elsewhere. Here and in the processes that tests start, it is a warning everywhere.
os.environ["TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING"] = "0"
functorch_config.error_on_custom_op_aliasing = False


@pytest.fixture
def clean() -> dict[str, str]:
    """The environment of a process that no emulated CANN was put under."""
    ours = {activation.SWITCH, activation.OPTIONS, "LD_LIBRARY_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    environ = {name: value for name, value in os.environ.items() if name not in ours}
    return {**environ, "PYTHONSAFEPATH": "1"}  # as for an installed command: the current folder is not on the path
