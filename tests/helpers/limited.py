"""Limits on the time and memory that a malicious input may take."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

SECONDS = 120
MEBIBYTES = 512


@contextmanager
def limited() -> Iterator[None]:
    """Fail if the block takes longer than :data:`SECONDS` or more memory than :data:`MEBIBYTES`."""

    def ring(*_: object) -> None:
        pytest.fail("timed out")

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert grown >> 10 < MEBIBYTES, f"it took {grown >> 10} MiB"
