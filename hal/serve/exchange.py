"""One HTTP exchange: the body of a request, its answer, and the end of both when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive, Scope, Send

from hal.serve.api_error import ApiError

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
