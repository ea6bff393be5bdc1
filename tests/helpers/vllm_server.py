"""Runs `vllm serve` with hal in a separate process."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import psutil

from helpers import engine_server
from helpers.engine_server import running
from helpers.vllm_programs import ENVIRONMENT, python

SHUTDOWN = 60
"""The ``--shutdown-timeout`` of the page. vLLM waits without a limit for streams that are under way after that."""


@attrs.define(eq=False)
class Server(engine_server.Server):
    """A running `vllm serve`."""

    def metric(self, name: str) -> float:
        """Return the sum of a gauge or counter over its labels."""
        found = re.findall(rf"^vllm:{name}(?:\{{[^}}]*\}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert found, f"the server has no metric {name}"
        return sum(map(float, found))

    def named(self, name: str) -> psutil.Process:
        """Return the process that vLLM calls ``EngineCore``, or ``Worker``: the last one of several ranks.

        vLLM writes the name and the process ID before each line of output. It makes the name the process's title too,
        but that fails without an error where the first environment variables have been changed.
        """
        found = {int(pid) for pid in re.findall(rf"^\({name}\S* pid=(\d+)\)", self.written(), re.MULTILINE)}
        found_running = [each for each in self.processes() if each.pid in found]
        assert found_running, f"no process of {self.processes()} is called {name}:\n{self.written()[-6000:]}"
        return max(found_running, key=psutil.Process.create_time)


@contextmanager
def served(checkpoint: Path, log: Path, hal: Mapping[str, Any], *arguments: str) -> Iterator[Server]:
    """Run ``vllm serve``, on the emulated CANN if torch_npu is installed. No process of it may be left in the end."""
    command = [
        *python(),
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(checkpoint),
        "--shutdown-timeout",
        str(SHUTDOWN),
        "--additional-config",
        json.dumps({"hal": dict(hal)}),
        *arguments,
    ]
    with running(Server, command, ENVIRONMENT, log) as server:
        yield server
