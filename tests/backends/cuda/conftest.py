"""Fixtures for tests that need a GPU. Without one the tests are skipped, with the probe's reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
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


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip files of tests that all need a GPU, as one each, where there is none."""
    if module_path.name.startswith("test_cuda_gpu_") and not probe().available:
        return NoGpu.from_parent(parent, path=module_path)  # type: ignore[no-any-return]
    return None


class NoGpu(pytest.Module):
    """A file whose tests need a GPU."""

    def collect(self) -> Iterator[pytest.Item]:
        raise pytest.skip.Exception(f"no GPU: {probe().reason}", allow_module_level=True)
