"""Fixtures for tests of the npu backend on the emulated CANN, which tests/conftest.py loads for torch_npu."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hal


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one CPU thread: the computations are small, and threads would compete with those of the streams."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    hal.open("cpu")


@pytest.fixture
def npu() -> Iterator[Callable[..., hal.Backend]]:
    """Return a function that opens and activates the npu backend. Keywords are configuration keys and ``options``."""

    def opened(**config: Any) -> hal.Backend:
        return hal.open({"backend": "npu", **config})

    yield opened
    hal.open("cpu")
