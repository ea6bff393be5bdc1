"""Runs programs with SGLang and hal, and `sglang serve`, in separate processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.distributions import installed
from helpers.engine_server import Server, running
from helpers.vllm_programs import python

needs_sglang = pytest.mark.skipif(not installed("sglang"), reason="SGLang is not installed: see make test-sglang")
ENVIRONMENT = {"SGLANG_PLATFORM": "hal", "HF_HUB_OFFLINE": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


@contextmanager
def served(checkpoint: Path, log: Path, hal: Mapping[str, Any], *arguments: str) -> Iterator[Server]:
    """Run ``sglang serve``, on the emulated CANN if torch_npu is installed. No process of it may be left in the end."""
    command = [
        *python(),
        str(Path(sys.executable).parent / "sglang"),
        "serve",
        "--model-path",
        str(checkpoint),
        "--json-model-override-args",
        json.dumps({"hal": dict(hal)}),
        *arguments,
    ]
    with running(Server, command, ENVIRONMENT, log) as server:
        yield server


def scheduler(server: Server) -> psutil.Process:
    """Return SGLang's process that runs the steps."""
    (found,) = [each for each in server.processes() if "sglang::scheduler" in " ".join(each.cmdline())]
    return found
