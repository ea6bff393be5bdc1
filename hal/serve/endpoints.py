"""The paths that take a request with a body, and answer it with a model."""

from __future__ import annotations

import asyncio
import base64
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic

import attrs
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from hal.errors import HalError
from hal.generation.generate import Piece
from hal.generation.llm.messages import media_of
from hal.serve.answers import json_text, usage
from hal.serve.jobs import Job, chat_job, completion_job, encoded
from hal.serve.request_fields import ApiError, ChatRequest, CompletionRequest, EmbeddingRequest, T, failed, refused
from hal.serve.server_state import CANCELLED, RETRY_AFTER, Admitted, ServerState

EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
JSON_TYPE = "application/json"


class ClientGone(Exception):
    """The client closed the connection."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: it is longer than ``limit`` bytes, or its type is not JSON. A web page can send other types to any
            address without asking the server.
        ClientGone: the client closed the connection.
    """
    headers = {name.lower(): value for name, value in scope["headers"]}
    kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if kind != JSON_TYPE:
        raise ApiError(415, f"the content type is {kind or 'missing'!r:.70}", f"send Content-Type: {JSON_TYPE}")
    length = headers.get(b"content-length", b"0")
    parts, size = list[bytes](), int(length) if length.isdigit() else 0
    more = True
    while more and size <= limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
        size = max(size, sum(map(len, parts)))
    if size > limit:
        raise ApiError(413, f"the body has more than {limit} bytes", "send less, or start the server with --max-body")
    return b"".join(parts)


async def until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``, and cancel it if the client closes the connection.

    Raises:
        ClientGone: it did.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        await working
    finally:
        for each in (working, watching):
            each.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """An answer of server-sent events. It begins with the first one.

    Args:
        send: sends the parts of the answer.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def send(self, *events: str) -> None:
        """Send events, each the text of JSON."""
        if not self.begun:
            await self._send({"type": "http.response.start", "status": 200, "headers": EVENTS})
            self.begun = True
        body = "".join(f"data: {each}\n\n" for each in events).encode()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        """Send the last event."""
        await self.send("[DONE]")
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def error_response(error: ApiError) -> Response:
    """Return the answer to a request that is not answered."""
    headers = {"Retry-After": str(RETRY_AFTER)} if error.status == 429 else None
    return JSONResponse(error.body, status_code=error.status, headers=headers)


@attrs.frozen
class Exchange:
    """A request that is admitted.

    Attributes:
        scope: ASGI's description of the request.
        began: the time of its arrival, by :func:`time.perf_counter`.
    """

    scope: Scope
    receive: Receive
    send: Send
    admitted: Admitted
    began: float

    async def send_json(self, content: Any) -> None:
        """Send the whole answer."""
        await JSONResponse(content)(self.scope, self.receive, self.send)


class Endpoint(ABC):
    """A path: an ASGI application."""

    path: str

    def __init__(self, state: ServerState) -> None:
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, until its client goes away."""
        began, status = time.perf_counter(), "500"
        try:
            with self.state.admission.entered() as admitted:
                body = await read_body(scope, receive, self.state.options.max_body)
                exchange = Exchange(scope, receive, send, admitted, began)
                await until_gone(receive, self.respond(body, exchange))
            status = "200"
        except ClientGone:
            status = CANCELLED
        except HalError as error:
            found = refused(error)
            status = str(found.status)
            await error_response(found)(scope, receive, send)
        finally:
            self.state.metrics.answered(self.path, status, began)

    @abstractmethod
    async def respond(self, body: bytes, exchange: Exchange) -> None:
        """Send the answer.

        Raises:
            HalError: the request is invalid, and nothing was sent.
        """


class TextEndpoint(Endpoint, Generic[T]):
    """A path that answers with texts."""

    request: type[T]

    async def respond(self, body: bytes, exchange: Exchange) -> None:
        """Run the request, and send its texts."""
        asked = await asyncio.to_thread(self.state.parse, self.request, body)
        # A long video must not take a thread that other requests need.
        pool = self.state.pool_for(self.media(asked))
        job = await asyncio.get_running_loop().run_in_executor(pool, self.job, asked)
        exchange.admitted.take(job.count)
        self.state.metrics.prompted(job.prompt_tokens)
        try:
            await (self._stream if job.stream else self._collect)(job, exchange)
        finally:
            job.pieces.cancel()

    def media(self, asked: T) -> set[str]:
        """Return the kinds of images and videos in a request."""
        return set()

    @abstractmethod
    def job(self, asked: T) -> Job:
        """Return what a request asks for. Runs in a thread.

        Raises:
            ApiError: the request is invalid.
        """

    async def _collect(self, job: Job, exchange: Exchange) -> None:
        echoed = [] if job.echo is None else list(itertools.chain(*await job.echo.pieces()))
        pieces = await self._read(exchange, job.pieces.read, first=True)
        pieces += await self._read(exchange, job.pieces.rest)
        exchange.admitted.end()
        await exchange.send_json(job.answer.whole(echoed + pieces, usage(job.prompt_tokens, len(pieces))))

    async def _stream(self, job: Job, exchange: Exchange) -> None:
        events, made = EventStream(exchange.send), 0
        echoed = [] if job.echo is None else await job.echo.pieces()
        try:
            if texts := [
                each for pieces in echoed if (each := job.answer.chunk(*pieces, with_usage=job.include_usage))
            ]:
                await events.send(*texts)
            while pieces := await self._read(exchange, job.pieces.read, first=not made):
                made += len(pieces)
                chunks = (job.answer.chunk(each, with_usage=job.include_usage) for each in pieces)
                if texts := [each for each in chunks if each is not None]:
                    await events.send(*texts)
            if job.include_usage:
                await events.send(job.answer.last_chunk(usage(job.prompt_tokens, made)))
        except ApiError as error:
            if not events.begun:
                raise
            await events.send(json_text(error.body))
        exchange.admitted.end()  # Before the client knows that the texts have ended.
        await events.end()

    async def _read(
        self, exchange: Exchange, read: Callable[[], Awaitable[list[Piece]]], *, first: bool = False
    ) -> list[Piece]:
        """Return the pieces that ``read`` gives, and count them."""
        try:
            found = await read()
        except HalError as error:
            raise failed(error) from error
        if first and found:
            self.state.metrics.first_token(exchange.began)
        self.state.metrics.generated(len(found))
        return found


class Completions(TextEndpoint[CompletionRequest]):
    """Continues prompts."""

    path = "/v1/completions"
    request = CompletionRequest

    def job(self, asked: CompletionRequest) -> Job:
        """Return what a request asks for."""
        return completion_job(self.state.llm, asked, self.state.options.max_texts)


class ChatCompletions(TextEndpoint[ChatRequest]):
    """Answers conversations."""

    path = "/v1/chat/completions"
    request = ChatRequest

    def media(self, asked: ChatRequest) -> set[str]:
        """Return the kinds of images and videos in the messages."""
        return {kind for _, kind, _ in media_of(asked.messages)}

    def job(self, asked: ChatRequest) -> Job:
        """Return what a request asks for."""
        options = self.state.options
        return chat_job(self.state.llm, asked, options.max_texts, options.switches)


class Embeddings(Endpoint):
    """Returns the embeddings of texts. However many they are, they count as one text."""

    path = "/v1/embeddings"

    async def respond(self, body: bytes, exchange: Exchange) -> None:
        """Compute the embeddings, and send them."""
        asked = await asyncio.to_thread(self.state.parse, EmbeddingRequest, body)
        if asked.model != self.state.options.name:
            problem = f"{asked.model!r:.70} is an adapter, and adapters embed no texts"
            raise ApiError(400, problem, f"use the model {self.state.options.name}", param="model")
        if asked.encoding_format not in ("float", "base64"):
            raise ApiError(
                400,
                f"encoding_format is {asked.encoding_format!r:.70}",
                "give float or base64",
                param="encoding_format",
            )
        prompts = await asyncio.to_thread(encoded, self.state.llm.embedder.tokens, asked.input, "input")
        found = (await self.state.llm.aembed(prompts)).numpy()
        total = sum(map(len, prompts))
        self.state.metrics.prompted(total)
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(each.astype("<f4").tobytes()).decode()
                if asked.encoding_format == "base64"
                else each.tolist(),
            }
            for index, each in enumerate(found)
        ]
        used = {"prompt_tokens": total, "total_tokens": total}
        await exchange.send_json({"object": "list", "model": asked.model, "data": data, "usage": used})
