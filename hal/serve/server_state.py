"""What the endpoints of a server share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import attrs

from hal.generation.llm.language_model import LLM
from hal.generation.llm.messages import KINDS
from hal.serve.admission import Admission
from hal.serve.api_error import ApiError
from hal.serve.request_fields import T, parse
from hal.serve.server_metrics import ServerMetrics

MEDIA_THREADS = 2
"""The threads for each kind. They bound the memory and the processors that large media take."""


@attrs.frozen
class ServerOptions:
    """What a server allows.

    Attributes:
        name: the model's name.
        max_texts: the most texts that run and wait.
        max_body: the most bytes of a request.
        api_key: the key that requests need; None for none.
        switches: variables of the chat template that a request does not set.
    """

    name: str
    max_texts: int
    max_body: int
    api_key: str | None = None
    switches: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class ServerState:
    """A model, and the requests that it answers.

    Attributes:
        llm: the model.
        options: what the server allows.
        admission: the texts that run and wait.
        metrics: the server's figures.
        pools: threads that prepare requests with an image or a video, by its kind.
    """

    llm: LLM
    options: ServerOptions
    admission: Admission
    metrics: ServerMetrics
    pools: Mapping[str, Executor] = attrs.field(
        factory=lambda: {kind: ThreadPoolExecutor(MEDIA_THREADS, f"hal-{kind}") for kind in KINDS}
    )

    @classmethod
    def of(cls, llm: LLM, options: ServerOptions) -> ServerState:
        """Return the state of a server that has answered nothing."""
        return cls(llm, options, Admission(options.max_texts), ServerMetrics(lambda: llm.occupancy))

    def parse(self, kind: type[T], body: bytes) -> T:
        """Return the fields of a request.

        Raises:
            ApiError: the request is invalid, or for another model.
        """
        asked = parse(kind, body)
        self.check_model(asked.model)
        return asked

    def pool_for(self, kinds: Collection[str]) -> Executor | None:
        """Return the threads that prepare a request with media of some kinds; None for asyncio's."""
        return next((self.pools[kind] for kind in reversed(KINDS) if kind in kinds), None)

    def check_model(self, name: str) -> None:
        """Raise ApiError unless a name is that of the model."""
        if name != self.options.name:
            raise ApiError(
                404,
                f"there is no model {name!r:.70}",
                f"this server has {self.options.name}",
                param="model",
                code="model_not_found",
            )
