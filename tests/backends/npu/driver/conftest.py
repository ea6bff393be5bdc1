"""The npu backend for the tests of this folder, on the emulated CANN that tests/conftest.py puts under torch_npu."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import hal


@pytest.fixture
def npu() -> Iterator[Callable[..., hal.Backend]]:
    """Opens the npu backend, active: keywords are keys of the configuration, ``options`` among them."""

    def opened(**config: Any) -> hal.Backend:
        return hal.open({"backend": "npu", **config})

    yield opened
    hal.open("cpu")
