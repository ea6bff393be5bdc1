"""Runs the HTTP server of an engine with hal in a separate process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import attrs
import psutil

START, STOP = 600.0, 60.0
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

    def post(self, path: str, asked: Any, timeout: float = 60) -> tuple[int, Any]:
        """Return the status of an answer to JSON, and its text, or what its JSON says."""
        data = json.dumps(asked).encode()
        request = Request(self.url + path, data=data, headers={"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=timeout) as answer:
                status, text = answer.status, answer.read().decode()
        except HTTPError as error:
            status, text = error.code, error.read().decode()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the server that run."""
        try:
            return [self.process, *self.process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def written(self) -> str:
        """Return the output."""
        return self.log.read_text(encoding="utf-8", errors="replace")


Made = TypeVar("Made", bound=Server)


@contextmanager
def running(
    make: Callable[[str, psutil.Popen, Path], Made], command: list[str], environment: Mapping[str, str], log: Path
) -> Iterator[Made]:
    """Run a server on a free port of 127.0.0.1, which the command gets as ``--port``.

    Asserts that no process of it is left in the end.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*command, "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, **environment, "OMP_NUM_THREADS": "1"}
    with log.open("w", encoding="utf-8") as out:
        process = psutil.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    server = make(f"http://127.0.0.1:{port}", process, log)
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
    assert not left, f"{left} did not end within {STOP} seconds:\n{server.written()[-6000:]}"


def _wait(server: Server) -> float:
    began = time.monotonic()
    while time.monotonic() - began < START:
        assert server.process.poll() is None, f"the server ended:\n{server.written()[-6000:]}"
        try:
            server.get("/health")
        except (URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
        else:
            return time.monotonic() - began
    raise AssertionError(f"the server did not answer within {START} seconds:\n{server.written()[-6000:]}")


def _signal(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)
