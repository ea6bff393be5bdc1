"""Runs `vllm serve` with hal in a separate process, and clients that send it requests."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import attrs
import psutil

from helpers.vllm_programs import ENVIRONMENT, python

START, STOP = 300.0, 60.0
"""Seconds within which a server answers, and within which all of its processes end."""


@attrs.define(eq=False)
class Server:
    """A running server.

    Attributes:
        url: its address.
        process: the process that was started. Its descendants are the server and the engine.
        log: its output.
        seconds: how long it took to answer.
    """

    url: str
    process: psutil.Popen
    log: Path
    seconds: float = 0.0

    def get(self, path: str) -> str:
        """Return an answer's text."""
        with urlopen(self.url + path, timeout=10) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        """Return the sum of a gauge or counter over its labels."""
        found = re.findall(rf"^vllm:{name}(?:\{{[^}}]*\}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert found, f"the server has no metric {name}"
        return sum(map(float, found))

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the server that run."""
        try:
            return [self.process, *self.process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def named(self, name: str) -> psutil.Process:
        """Return the process that vLLM calls ``EngineCore``, or ``Worker``: the last one of several ranks.

        vLLM writes the name and the process ID before each line of output. It makes the name the process's title too,
        but that fails without an error where the first environment variables have been changed.
        """
        written = self.log.read_text(encoding="utf-8", errors="replace")
        found = {int(pid) for pid in re.findall(rf"^\({name}\S* pid=(\d+)\)", written, re.MULTILINE)}
        running = [each for each in self.processes() if each.pid in found]
        assert running, f"no process of {self.processes()} is called {name}:\n{_end(self.log)}"
        return max(running, key=psutil.Process.create_time)


@contextmanager
def served(checkpoint: Path, log: Path, hal: Mapping[str, Any], *arguments: str) -> Iterator[Server]:
    """Run ``vllm serve`` on a free port of 127.0.0.1, on the emulated CANN if torch_npu is installed.

    Asserts that no process of it is left in the end.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *python(), "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint), "--host", "127.0.0.1",
        "--port", str(port), "--additional-config", json.dumps({"hal": dict(hal)}), *arguments,
    ]  # fmt: skip
    environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    with log.open("w", encoding="utf-8") as out:
        process = psutil.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    server = Server(f"http://127.0.0.1:{port}", process, log)
    known: list[psutil.Process] = []
    try:
        server.seconds = _wait(server)
        known = server.processes()
        yield server
    finally:
        known = list({*known, *server.processes()})
        if process.poll() is None:
            for each in known:
                _signal(each, signal.SIGTERM)
        _, left = psutil.wait_procs(known, timeout=STOP)
        for each in left:
            _signal(each, signal.SIGKILL)
        psutil.wait_procs(left, timeout=STOP)
    assert not left, f"{left} did not end within {STOP} seconds:\n{_end(log)}"


def _wait(server: Server) -> float:
    began = time.monotonic()
    while time.monotonic() - began < START:
        assert server.process.poll() is None, f"the server ended:\n{_end(server.log)}"
        try:
            server.get("/health")
        except (URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
        else:
            return time.monotonic() - began
    raise AssertionError(f"the server did not answer within {START} seconds:\n{_end(server.log)}")


def _signal(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _end(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-6000:]
