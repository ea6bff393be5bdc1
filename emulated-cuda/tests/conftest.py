"""Skips the emulator's tests in processes that do not run on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from emulated_cuda.calls import Calls
from emulated_cuda.libraries import is_active


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests if this process does not run on the emulator."""
    if is_active():
        return
    folder = f"{Path(__file__).parent}/"
    for each in items:
        if str(each.path).startswith(folder):
            each.add_marker(pytest.mark.skip(reason="not on the emulated CUDA: see make test-cuda-emulated"))


@pytest.fixture
def cuda() -> Iterator[Calls]:
    """Return the CUDA functions. Clears the last error, which torch would report later."""
    calls = Calls()
    yield calls
    calls.call("cudaGetLastError")
