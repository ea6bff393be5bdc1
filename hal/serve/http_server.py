"""The HTTP server: a socket, uvicorn, and the end at SIGTERM."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from hal.errors import ConfigError


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket with an address. It refuses connections until :func:`run` listens.

    Args:
        host: a name or an address.
        port: 0 for a free one.

    Raises:
        ConfigError: there is no such address here, or another program has it.
    """
    made: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        if made is not None:
            made.close()
        raise ConfigError(
            f"the server cannot have the address {host}, port {port}: {error.strerror or error}",
            "choose another --port or --host",
        ) from None
    return made


def run(
    app: ASGIApp,
    listener: socket.socket,
    shutdown_seconds: int,
    ready: Callable[[], None],
    ended: Callable[[], bool],
) -> None:
    """Answer requests until SIGTERM or SIGINT. Both let running requests end, for so many seconds.

    Args:
        app: answers requests.
        listener: the socket.
        shutdown_seconds: the seconds.
        ready: called when the server answers.
        ended: asked often; once it returns True, the server ends.

    Raises:
        KeyboardInterrupt: SIGINT ended the server.
    """

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                ready()

        async def on_tick(self, counter: int) -> bool:
            return await super().on_tick(counter) or ended()

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=shutdown_seconds,
    )
    with _ending_at_sigterm():
        Server(config).run(sockets=[listener])


@contextmanager
def _ending_at_sigterm() -> Iterator[None]:
    """Let SIGTERM end the server, and not the process: uvicorn raises it again after the server's end."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
