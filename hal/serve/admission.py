"""The limit of texts that a server takes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hal.serve.api_error import ApiError

RETRY_AFTER = 1
"""Seconds after which a refused client may ask again."""


class Admission:
    """Counts the texts that run and wait. Threading: the event loop's thread only.

    Args:
        limit: the most texts.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._admitted = 0

    @contextmanager
    def entered(self) -> Iterator[Admitted]:
        """Admit a request in the block, which counts as one text until more are taken.

        Raises:
            ApiError: the server has as many as it takes.
        """
        admitted = Admitted(self)
        try:
            admitted.take(1)
            yield admitted
        finally:
            admitted.end()

    def _take(self, count: int) -> None:
        if count > 0 and self._admitted + count > self.limit:
            raise ApiError(
                429,
                f"{self._admitted} texts run or wait, and the server takes {self.limit}",
                f"ask again after {RETRY_AFTER} s",
                code="rate_limit_exceeded",
            )
        self._admitted += count


class Admitted:
    """An admitted request.

    Attributes:
        texts: the number of its texts.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.texts = 0

    def take(self, texts: int) -> None:
        """Raise the number of the request's texts.

        Raises:
            ApiError: the server does not take as many now.
        """
        self._admission._take(texts - self.texts)
        self.texts = texts

    def end(self) -> None:
        """Let others in: the request has its texts."""
        self._admission._take(-self.texts)
        self.texts = 0
