"""The GPU for the tests of this folder that need one. Without it they are skipped, with the probe's reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hal.backends.cuda.probe import probe

import hal


@pytest.fixture(scope="session")
def gpu_here() -> None:
    """Skips what uses it where the driver cannot run."""
    found = probe()
    if not found.available:
        pytest.skip(f"no GPU: {found.reason}")


@pytest.fixture
def gpu(gpu_here: None) -> Iterator[Callable[..., hal.Backend]]:
    """Opens the cuda backend, active: keywords are keys of the configuration, ``options`` among them."""

    def opened(**config: Any) -> hal.Backend:
        return hal.open({"backend": "cuda", **config})

    yield opened
    hal.open("cpu")
