"""Fixtures that many tests share."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hal
from hal import ops

# transformers imports torch_npu wherever that is installed, and without CANN the import fails: out of sight, then.
# tests/emulator, which brings a CANN, has its own process and takes this back.
sys.modules.setdefault("torch_npu", None)  # type: ignore[arg-type]

# Tracing makes millions of objects that live on. If every 700 new ones are searched for cycles, as by default, that is
# a tenth of the suites' time.
gc.set_threshold(20_000, 10, 10)


@pytest.fixture
def cpu() -> hal.Backend:
    """The CPU backend, active."""
    return hal.open("cpu")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).parent.parent


@pytest.fixture(scope="session")
def trained(repository: Path) -> Path:
    """The trained checkpoint."""
    return repository / "checkpoints" / "tiny-python"


@pytest.fixture
def forget_operations() -> Iterator[None]:
    """Take operations that a test declares out of the catalogue again, so that no other test meets them."""
    from hal.ops import declaration

    known = set(ops.catalogue())
    yield
    for name in set(ops.catalogue()) - known:
        operation = declaration._catalogue.pop(name)
        del declaration._by_function[operation.function]
        del declaration._by_node[operation.overload]
