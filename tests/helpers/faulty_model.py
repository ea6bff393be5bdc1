"""A model of another package, on whose rank 1 a fault happens: FAULT is the fault, and FAULT_AT the point."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from hal.models.qwen3 import Qwen3ForCausalLM
from torch import Tensor

from helpers.checkpoints import write_json

STRUCK_AT = 4
"""The number of the step in which the fault happens."""
DELAY = 0.5
"""Seconds after the captures in which a process is killed or frozen, when it replays its steps."""
LATE = 30
"""Seconds by which a rank is late."""
FROZEN = 18
"""Seconds for which a process is frozen: less than in which the ranks are ended, so that nothing is left to thaw it."""
UNLIKELY = 4095
"""The stop token, so that a text does not end before the fault."""
METADATA = "Metadata-Version: 2.1\nName: faulty-model\nVersion: 1\n"
ENTRY_POINT = "[hal.models]\nFaultyForCausalLM = helpers.faulty_model:FaultyForCausalLM\n"


class FaultyForCausalLM(Qwen3ForCausalLM):
    """Qwen3, with a fault."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.steps = 0
        self.point = os.environ["FAULT_AT"] if os.environ.get("RANK") == "1" else ""
        if self.point == "loading":
            strike()

    def eval(self) -> FaultyForCausalLM:
        """Return the loaded model."""
        if self.point in ("capture", "replay"):
            log = logging.getLogger("hal.execution")
            log.setLevel(logging.INFO)
            log.addHandler(_Captures(self.point))
        super().eval()
        return self

    def forward(self, *arguments: Any) -> Tensor:
        if self.point == "step":
            self.steps += 1
            if self.steps == STRUCK_AT:
                strike()
        return super().forward(*arguments)


class _Captures(logging.Handler):
    """Lets the fault happen before the first capture, or after the last, by what the runner logs."""

    def __init__(self, point: str) -> None:
        super().__init__()
        self.point = point

    def emit(self, record: logging.LogRecord) -> None:
        if self.point == "capture":
            strike()
        elif record.getMessage().startswith("captured decode"):
            threading.Timer(DELAY, strike_from_outside).start()


def strike() -> None:
    """Let the fault happen."""
    match os.environ["FAULT"]:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raises":
            raise ValueError("the fault of rank 1")
        case "late":
            time.sleep(LATE)


def strike_from_outside() -> None:
    """Kill this process, or freeze it for a time."""
    if os.environ["FAULT"] == "late":
        script = f"kill -STOP {os.getpid()}; sleep {FROZEN}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return
    os.kill(os.getpid(), signal.SIGKILL)


def write_faulty(trained: Path, folder: Path) -> Path:
    """Write the package, and a checkpoint with this model and the files of another checkpoint. Return the latter."""
    from hal.config import parse_json

    package, checkpoint = folder / "faulty_model-1.dist-info", folder / "checkpoint"
    package.mkdir()
    (package / "METADATA").write_text(METADATA)
    (package / "entry_points.txt").write_text(ENTRY_POINT)
    checkpoint.mkdir()
    for file in trained.iterdir():
        (checkpoint / file.name).symlink_to(file)
    config = dict(parse_json((trained / "config.json").read_text(encoding="utf-8"), "config.json"))
    (checkpoint / "config.json").unlink()
    write_json(checkpoint / "config.json", {**config, "architectures": ["FaultyForCausalLM"], "eos_token_id": UNLIKELY})
    (checkpoint / "generation_config.json").unlink(missing_ok=True)
    return checkpoint
