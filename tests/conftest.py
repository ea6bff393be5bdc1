"""Fixtures that many tests share."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hal
from hal import ops

# transformers imports torch_npu wherever that is installed, and without CANN the import fails: out of sight, then.
# tests/emulator, which brings a CANN, has its own process and takes this back.
sys.modules.setdefault("torch_npu", None)  # type: ignore[arg-type]

# A job in the background of a script ignores interrupts, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tracing makes millions of objects that live on. If every 700 new ones are searched for cycles, as by default, that is
# a tenth of the suites' time.
gc.set_threshold(20_000, 10, 10)

# Workers take whole files. Those that take longest come first: begun last, one would leave the other workers idle.
LONG = (
    "npu/test_models.py", "npu/test_schemes.py", "npu/test_npugraph_ex.py", "npu/test_pieces.py",
    "npu/test_runner.py", "conformance/npu/test_npu.py", "conformance/npu/test_npu_fractal.py",
    "npu/test_documentation.py", "emulator/test_activation.py", "emulator/test_scripts.py",
    "test_doctor.py", "test_documentation.py", "test_transformers.py", "cuda/test_triton_kernels.py", "test_llama.py",
    "conformance/test_cpu.py", "test_pieces.py", "test_bench.py", "test_rewrites.py", "test_new_driver.py",
    "test_quantized_models.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first; the order within a file, and of the others, stays."""
    folder = Path(__file__).parent
    ranks = {folder / name: rank for rank, name in enumerate(LONG)}
    assert not [path for path in ranks if not path.exists()], "a file was renamed, and still has its old name in LONG"
    items.sort(key=lambda item: ranks.get(item.path, len(LONG)))


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
    from hal.ops.declaration import operation as declared

    known = set(ops.catalogue())
    yield
    for name in set(ops.catalogue()) - known:
        operation = declared._catalogue.pop(name)
        del declared._by_function[operation.function]
        del declared._by_node[operation.overload]
