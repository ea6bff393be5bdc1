"""The texts of requests in pieces, as their tokens arrive: for threads, and for an event loop."""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import closing
from typing import ClassVar

import attrs

from hal.errors import HalError
from hal.generation.generate import Piece, piece_of
from hal.generation.generated_text import GeneratedText
from hal.generation.llm.serving_loop import ServingLoop
from hal.generation.request import Request, Token


def iterate_pieces(serving: ServingLoop, request: Request, text: GeneratedText) -> Iterator[Piece]:
    """Run a request, and yield a piece for each token. Closing the iterator cancels it."""
    arrived: queue.SimpleQueue[Token | HalError] = queue.SimpleQueue()
    serving.submit([request], lambda _, token: arrived.put(token))
    finished = None
    try:
        while finished is None:
            token = arrived.get()
            if isinstance(token, HalError):
                raise token
            yield (piece := piece_of(token, text))
            finished = piece.finished
    finally:
        serving.cancel([request])


def iterate_texts(pieces: Iterator[Piece]) -> Iterator[str]:
    """Yield the texts of pieces that have one."""
    with closing(pieces):  # type: ignore[type-var]
        for piece in pieces:
            if piece.text:
                yield piece.text


class PieceStream(AsyncIterator[Piece]):
    """The pieces of several requests, in the order in which they arrive. They run from the first read on.

    An error of one ends all. So does :meth:`cancel`, and the end of the stream's last reference.

    Threading: one task of an event loop reads.

    Args:
        texts: the requests, and the text of each.
    """

    def __init__(self, serving: ServingLoop, texts: Mapping[Request, GeneratedText]) -> None:
        self._serving = serving
        self._texts = texts
        self._left = len(texts)
        self._arrivals: _Arrivals | None = None
        self._pieces: deque[Piece] = deque()

    def __del__(self) -> None:
        if self._arrivals is not None:
            self.cancel()

    async def __anext__(self) -> Piece:
        """Return the next piece.

        Raises:
            StopAsyncIteration: all texts have ended.
            HalError: as :meth:`read`.
        """
        if not self._pieces:
            self._pieces.extend(await self.read())
        if not self._pieces:
            raise StopAsyncIteration
        return self._pieces.popleft()

    async def read(self) -> list[Piece]:
        """Wait for a piece, and return all that have arrived; none if all texts have ended.

        Raises:
            HalError: a step failed, or the LLM is closed.
        """
        return await self._read(each=True)

    async def rest(self) -> list[Piece]:
        """Wait until all texts have ended, and return the pieces that were not read.

        Raises:
            HalError: as :meth:`read`.
        """
        pieces = list[Piece]()
        while found := await self._read(each=False):
            pieces += found
        return pieces

    async def _read(self, *, each: bool) -> list[Piece]:
        if not self._left:
            return []
        if self._arrivals is None:
            self._arrivals = _Arrivals(_Waker.of_running_loop())
            self._serving.submit(list(self._texts), self._arrivals.put)
        found = []
        for request, token in await self._arrivals.take(each=each):
            if isinstance(token, HalError):
                self.cancel()
                raise token
            piece = piece_of(token, self._texts[request], request.sample_index)
            found.append(attrs.evolve(piece, choices=request.choices) if request.choices else piece)
            self._left -= token.finished is not None
        return found

    def cancel(self) -> None:
        """End the requests that run, and free what they hold."""
        if self._left:
            self._left = 0
            self._serving.cancel(list(self._texts))


class _Arrivals:
    """Passes tokens from the serving loop's thread to a task, which wakes once for all that arrive meanwhile."""

    def __init__(self, waker: _Waker) -> None:
        self._waker = waker
        self._arrived: deque[tuple[Request, Token | HalError]] = deque()
        self._each = True
        self._waiting: asyncio.Future[None] | None = None

    def put(self, request: Request, token: Token | HalError) -> None:
        self._arrived.append((request, token))
        if self._each or _ends(token):
            self._waker.wake(self)

    def arrived(self) -> None:
        """Let the task go on. Called in its thread."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self, *, each: bool) -> list[tuple[Request, Token | HalError]]:
        """Wait for a token, or unless ``each``, for one that ends a text, and return all that have arrived."""
        self._each = each
        while not (self._arrived if each else any(_ends(token) for _, token in list(self._arrived))):
            self._waiting = self._waker.loop.create_future()
            await self._waiting
        return [self._arrived.popleft() for _ in range(len(self._arrived))]


def _ends(token: Token | HalError) -> bool:
    return isinstance(token, HalError) or token.finished is not None


class _Waker:
    """Wakes the tasks of an event loop from other threads. Each call of the loop serves all tasks that are due."""

    _of_loops: ClassVar[dict[asyncio.AbstractEventLoop, _Waker]] = {}

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._due: deque[_Arrivals] = deque()
        self._called = False

    @classmethod
    def of_running_loop(cls) -> _Waker:
        """Return the waker of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in cls._of_loops:
            cls._of_loops = {each: waker for each, waker in list(cls._of_loops.items()) if not each.is_closed()}
            cls._of_loops[loop] = cls(loop)
        return cls._of_loops[loop]

    def wake(self, arrivals: _Arrivals) -> None:
        """Wake the task that takes ``arrivals``.

        Raises:
            RuntimeError: the event loop is closed.
        """
        self._due.append(arrivals)
        if not self._called:
            self._called = True
            try:
                self.loop.call_soon_threadsafe(self._run)
            except RuntimeError:
                self._called = False
                raise

    def _run(self) -> None:
        self._called = False  # Before the tasks wake: what is due from here on calls again.
        while self._due:
            self._due.popleft().arrived()


async def iterate_texts_asynchronously(pieces: PieceStream) -> AsyncIterator[str]:
    """Yield the texts of pieces that have one."""
    try:
        async for piece in pieces:
            if piece.text:
                yield piece.text
    finally:
        pieces.cancel()
