"""Servers of hal's API: in a thread of this process, and as the command ``hal serve``."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import uvicorn

import hal
from hal.serve.application import application, bound_socket
from hal.serve.server_state import ServerOptions
from helpers.engine_server import Server, running
from helpers.waiting import until

COMMAND = [sys.executable, "-P", "-c", "from hal_command import main; main()", "serve"]


@contextmanager
def served(llm: hal.LLM, **options: Any) -> Iterator[str]:
    """Serve a model in a thread, and yield the address."""
    allowed = ServerOptions(**{"name": "tiny", "max_texts": 64, "max_body": 1 << 20, **options})
    listener = bound_socket("127.0.0.1", 0)
    config = uvicorn.Config(application(llm, allowed), log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    until(lambda: server.started)
    try:
        yield "http://127.0.0.1:{1}".format(*listener.getsockname())
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def command(checkpoint: Path, log: Path, *arguments: str, **environment: str) -> Iterator[Server]:
    """Run ``hal serve``. No process of it may be left in the end."""
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **environment}
    with running(Server, [*COMMAND, str(checkpoint), *arguments], environment, log) as server:
        yield server


def ask(url: str, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any, dict[str, str]]:
    """Return status, JSON and headers of an answer."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=60)
    try:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, names)
        answer = connection.getresponse()
        text = answer.read()
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return answer.status, json.loads(text) if is_json else text.decode(), dict(answer.headers)
    finally:
        connection.close()


def metric(url: str, name: str) -> float:
    """Return the sum of a figure over its labels."""
    found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", ask(url, "GET", "/metrics")[1], re.MULTILINE)
    assert found, f"the server has no figure {name}"
    return sum(map(float, found))
