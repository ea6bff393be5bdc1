"""The figures of a server, in Prometheus's text format."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hal.generation.llm.serving_loop import Occupancy

SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""The upper bounds of the histograms."""
CANCELLED = "cancelled"
"""The status of a request whose client went away."""


class ServerMetrics:
    """Counts requests and tokens.

    Args:
        occupancy: returns what the model has to do.
    """

    def __init__(self, occupancy: Callable[[], Occupancy]) -> None:
        self._registry = registry = CollectorRegistry()
        gauges = {
            "hal_texts_running": ("Texts that are generated.", lambda: occupancy().running),
            "hal_texts_waiting": ("Texts that wait.", lambda: occupancy().waiting),
            "hal_cache_blocks": ("Blocks of the cache that running texts hold.", lambda: occupancy().blocks),
            "hal_cache_blocks_limit": ("All blocks of the cache.", lambda: occupancy().num_blocks),
        }
        for name, (text, value) in gauges.items():
            Gauge(name, text, registry=registry).set_function(value)
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
