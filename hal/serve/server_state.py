"""The state that the endpoints of a server share: its limit of texts, and its figures in Prometheus's text format."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hal.generation.drafting.draft_length import Acceptance
from hal.generation.llm.language_model import LLM
from hal.generation.llm.messages import KINDS
from hal.generation.llm.serving_loop import Occupancy
from hal.serve.request_fields import ApiError, T, parse

RETRY_AFTER = 1
"""Seconds after which a refused client may ask again."""


class Admission:
    """Counts the texts that run and wait. Threading: the event loop's thread only."""

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


SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""The upper bounds of the histograms."""
CANCELLED = "cancelled"
"""The status of a request whose client went away."""


class ServerMetrics:
    """Counts requests and tokens.

    Args:
        occupancy: returns what the model has to do.
        acceptance: returns how many drafted tokens it agreed with; None without a drafter.
    """

    def __init__(
        self, occupancy: Callable[[], Occupancy], acceptance: Callable[[], Acceptance | None] = lambda: None
    ) -> None:
        self._registry = registry = CollectorRegistry()
        gauges = {
            "hal_texts_running": ("Texts that are generated.", lambda: occupancy().running),
            "hal_texts_waiting": ("Texts that wait.", lambda: occupancy().waiting),
            "hal_cache_blocks": ("Blocks of the cache that running texts hold.", lambda: occupancy().blocks),
            "hal_cache_blocks_limit": ("All blocks of the cache.", lambda: occupancy().num_blocks),
        }
        for name, (text, value) in gauges.items():
            Gauge(name, text, registry=registry).set_function(value)
        if (found := acceptance()) is not None:
            for kind, text in (("drafted", "Tokens that the drafter proposed"), ("accepted", "Drafts that were right")):
                gauge = Gauge(f"hal_{kind}_tokens", f"{text}, by place behind a text.", ["place"], registry=registry)
                for place in range(len(found.drafted)):
                    gauge.labels(str(place + 1)).set_function(partial(_drafts, acceptance, kind, place))
        self._requests = Counter(
            "hal_requests", "Answered requests, by HTTP status.", ["path", "status"], registry=registry
        )
        self._prompt_tokens = Counter("hal_prompt_tokens", "Tokens of prompts.", registry=registry)
        self._new_tokens = Counter("hal_generated_tokens", "New tokens.", registry=registry)
        self._first = Histogram(
            "hal_time_to_first_token_seconds", "From a request to its first token.", buckets=SECONDS, registry=registry
        )
        self._whole = Histogram("hal_request_seconds", "From a request to its end.", buckets=SECONDS, registry=registry)

    def text(self) -> bytes:
        """Return all figures."""
        return generate_latest(self._registry)

    def answered(self, path: str, status: int | str, began: float) -> None:
        """Count a request that has ended, ``began`` by :func:`time.perf_counter`."""
        self._requests.labels(path, str(status)).inc()
        self._whole.observe(time.perf_counter() - began)

    def prompted(self, tokens: int) -> None:
        """Count the tokens of prompts."""
        self._prompt_tokens.inc(tokens)

    def generated(self, tokens: int) -> None:
        """Count new tokens."""
        self._new_tokens.inc(tokens)

    def first_token(self, began: float) -> None:
        """Note the first token of a request."""
        self._first.observe(time.perf_counter() - began)


def _drafts(acceptance: Callable[[], Acceptance | None], kind: str, place: int) -> int:
    found = acceptance()
    return 0 if found is None else int(getattr(found, kind)[place])


MEDIA_THREADS = 2
"""The threads for each kind. They bound the memory and the processors that large media take."""


@attrs.frozen
class ServerOptions:
    """What a server allows.

    Attributes:
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
        admission: the texts that run and wait.
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
        return cls(
            llm, options, Admission(options.max_texts), ServerMetrics(lambda: llm.occupancy, lambda: llm.acceptance)
        )

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
        """Raise ApiError unless a name is that of the model, or of one of its adapters."""
        if name not in (known := [self.options.name, *self.llm.adapters]):
            raise ApiError(
                404,
                f"there is no model {name!r:.70}",
                f"this server has {', '.join(known)}",
                param="model",
                code="model_not_found",
            )
