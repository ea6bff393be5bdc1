"""The HTTP server: its paths, its key, the form of its errors, its socket, and its end at SIGTERM."""

from __future__ import annotations

import hmac
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hal.errors import ConfigError
from hal.generation.llm.language_model import LLM
from hal.serve.endpoints import ChatCompletions, Completions, Embeddings, error_response
from hal.serve.request_fields import ApiError
from hal.serve.server_state import ServerOptions, ServerState

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def application(llm: LLM, options: ServerOptions) -> ASGIApp:
    """Return the application that answers requests with a model."""
    state, created = ServerState.of(llm, options), int(time.time())

    def model_of(name: str) -> dict[str, Any]:
        known = {"id": name, "object": "model", "created": created, "owned_by": "hal", "max_model_len": llm.max_length}
        return known if name == options.name else {**known, "parent": options.name}

    async def health(request: Request) -> Response:
        return Response(status_code=200)

    async def metrics(request: Request) -> Response:
        return Response(state.metrics.text(), media_type=PROMETHEUS)

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model_of(each) for each in (options.name, *llm.adapters)]})

    async def one_model(request: Request) -> Response:
        try:
            state.check_model(request.path_params["name"])
        except ApiError as error:
            return error_response(error)
        return JSONResponse(model_of(request.path_params["name"]))

    routes = [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        *(Route(each.path, each(state), methods=["POST"]) for each in (Completions, ChatCompletions, Embeddings)),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error, Exception: _unexpected})
    return app if options.api_key is None else _with_key(app, options.api_key)


def _with_key(app: ASGIApp, key: str) -> ASGIApp:
    """Return an application that answers requests below /v1 only if they have the key."""
    expected = f"Bearer {key}".encode()

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1"):
            given = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
            if not hmac.compare_digest(given, expected):
                error = ApiError(
                    401, "the API key is missing or wrong", "send Authorization: Bearer KEY", code="invalid_api_key"
                )
                return await error_response(error)(scope, receive, send)
        return await app(scope, receive, send)

    return guarded


async def _http_error(request: Request, error: Exception) -> Response:
    """Return the answer for a path or a method that the server does not have."""
    assert isinstance(error, HTTPException)
    paths = "/v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models, /health, /metrics"
    found = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", f"the paths: {paths}")
    return JSONResponse(found.body, status_code=found.status, headers=error.headers)


async def _unexpected(request: Request, error: Exception) -> Response:
    """Return the answer for a fault of the server, which Starlette raises again, so that it is logged."""
    return error_response(ApiError(500, f"the server failed: {type(error).__name__}", "see its log"))


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
