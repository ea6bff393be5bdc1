"""A model of another package, on whose rank 1 a fault happens: FAULT is the fault, and FAULT_AT the point."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any

from hal.models.qwen3 import Qwen3Config, Qwen3ForCausalLM
from torch import Tensor

STRUCK_AT = 4
"""The number of the step in which the fault happens."""
DELAY = 1.0
"""Seconds after loading in which a process is killed, when it replays its steps."""
LATE = 30


class FaultyForCausalLM(Qwen3ForCausalLM):
    """Qwen3, with a fault."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        self.steps = 0
        self.point = os.environ["FAULT_AT"] if os.environ.get("RANK") == "1" else ""
        if self.point == "loading":
            strike()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FaultyForCausalLM:
        return cls(Qwen3Config.from_config(config))

    def eval(self) -> FaultyForCausalLM:
        """Return the loaded model."""
        if self.point == "replay":
            threading.Timer(DELAY, strike).start()
        super().eval()
        return self

    def forward(self, *arguments: Any) -> Tensor:
        if self.point == "step":
            self.steps += 1
            if self.steps == STRUCK_AT:
                strike()
        return super().forward(*arguments)


def strike() -> None:
    """Let the fault happen."""
    match os.environ["FAULT"]:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raises":
            raise ValueError("the fault of rank 1")
        case "late":
            time.sleep(LATE)
