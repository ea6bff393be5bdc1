"""Fixtures for tests of the npu backend on the emulated CANN, which tests/conftest.py loads for torch_npu."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import hal


@pytest.fixture
def npu() -> Iterator[Callable[..., hal.Backend]]:
    """Return a function that opens and activates the npu backend. Keywords are configuration keys and ``options``."""

    def opened(**config: Any) -> hal.Backend:
        return hal.open({"backend": "npu", **config})

    yield opened
    hal.open("cpu")
