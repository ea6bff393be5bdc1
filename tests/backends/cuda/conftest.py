"""Fixtures for tests that need a GPU. Without one the tests are skipped, with the probe's reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hal.backends.cuda.probe import probe

import hal


@pytest.fixture(scope="session")
def gpu_here() -> None:
    """Skip the test if the CUDA driver cannot run."""
    found = probe()
    if not found.available:
        pytest.skip(f"no GPU: {found.reason}")


@pytest.fixture
def gpu(gpu_here: None) -> Iterator[Callable[..., hal.Backend]]:
    """Return a function that opens and activates the cuda backend. Keywords are configuration keys and ``options``."""

    def opened(**config: Any) -> hal.Backend:
        return hal.open({"backend": "cuda", **config})

    yield opened
    hal.open("cpu")
