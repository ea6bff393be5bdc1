"""The emulated CANN, under the real torch_npu, for every test of this folder, which runs in a process of its own."""

from __future__ import annotations

import os
import sys

from hal.backends.npu import emulator

if sys.modules.get("torch_npu", ...) is None:  # hidden by the conftest.py above this one
    del sys.modules["torch_npu"]
# One that is refused must not stop torch_npu's queue for the tests after it.
os.environ.setdefault("TASK_QUEUE_ENABLE", "0")
emulator.activate(devices=2)
