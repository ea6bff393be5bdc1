"""The ASGI application of a server: its paths, its key, and the form of its errors."""

from __future__ import annotations

import hmac
import time

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hal.generation.llm.language_model import LLM
from hal.serve.api_error import ApiError
from hal.serve.endpoints import ChatCompletions, Completions, Embeddings, error_response
from hal.serve.server_state import ServerOptions, ServerState

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def application(llm: LLM, options: ServerOptions) -> ASGIApp:
    """Return the application that answers requests with a model."""
    state, created = ServerState.of(llm, options), int(time.time())
    model = {
        "id": options.name,
        "object": "model",
        "created": created,
        "owned_by": "hal",
        "max_model_len": llm.max_length,
    }

    async def health(request: Request) -> Response:
        return Response(status_code=200)

    async def metrics(request: Request) -> Response:
        return Response(state.metrics.text(), media_type=PROMETHEUS)

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        try:
            state.check_model(request.path_params["name"])
        except ApiError as error:
            return error_response(error)
        return JSONResponse(model)

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
