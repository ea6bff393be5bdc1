"""Fixtures shared by many tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# These are read when torch is imported, or before. torch would import torch_npu, which fails without CANN.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
# Workers of pytest-xdist use the cores, so each has one thread, and Inductor's workers would only import torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest

pytest.register_assert_rewrite("helpers")
pytest_plugins = ["helpers.thorough_plugin"]

from helpers import ROOT, separate  # noqa: E402
from helpers.catalogue import forgetting_operations  # noqa: E402
from helpers.checkpoints import first_layers  # noqa: E402

import hal  # noqa: E402
from hal.config.compile_cache import CACHE_DIR, cache_folder  # noqa: E402
from hal.device.group import forget_group, register_group  # noqa: E402
from hal.parallel import Group  # noqa: E402

# A script's background job ignores interrupts, and one of nohup hangups; so would the processes that tests end so.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Kernels are compiled once, for tests and processes with another home folder, too. The emulated CANN's libraries are
# where its own tests have them.
os.environ.setdefault(CACHE_DIR, str(cache_folder("any").parent))
separate.keep_cache()

# Tracing creates millions of long-lived objects. Garbage collection every 700 objects, the default, takes a tenth of
# the suite's time.
gc.set_threshold(20_000, 10, 10)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Prepare this process for the tests in the arguments, or refuse the combination."""
    kind = separate.check(config.args, config.invocation_params.dir)
    if kind == separate.CORE:
        # transformers imports torch_npu if it is installed, and without CANN the import fails, so hide it.
        sys.modules.setdefault("torch_npu", None)  # type: ignore[arg-type]
    elif not separate.unavailable():
        if kind == "backends/npu/driver":
            # A refused operation must not stop torch_npu's queue for later tests.
            os.environ.setdefault("TASK_QUEUE_ENABLE", "0")
        separate.activate()


def pytest_unconfigure() -> None:
    """Let the interpreter's last garbage collection see everything; see :func:`long_lived_objects`."""
    gc.unfreeze()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip files that import torch_npu if it is not installed."""
    if separate.kind_of(module_path) == separate.CORE or not separate.unavailable():
        return None
    return separate.Unavailable.from_parent(parent, path=module_path)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Name the folders whose tests are not in this run."""
    return [
        f"not in this run, but by itself: pytest {folder}"
        for folder in separate.left_out(config.args, config.invocation_params.dir)
    ]


@pytest.fixture(scope="module", autouse=True)
def long_lived_objects() -> None:
    """Keep collected tests and imported libraries out of garbage collections, of which each closed runner makes one.

    In a process that has collected the suite and loaded a compiler, one takes a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def cpu() -> hal.Backend:
    """Return the CPU backend, active."""
    return hal.open("cpu")


@pytest.fixture(scope="session")
def repository() -> Path:
    """Return the root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def trained(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the first two layers of the trained checkpoint, which take half of its time."""
    return first_layers(repository / "checkpoints" / "tiny-python", tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def trained_experts(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the first two layers of the trained mixture of experts. The second one has the experts."""
    return first_layers(repository / "checkpoints" / "tiny-python-moe", tmp_path_factory.mktemp("trained"))


@pytest.fixture
def forget_operations() -> Iterator[None]:
    """Remove operations that a test declares from the catalogue, so that they do not affect other tests."""
    with forgetting_operations():
        yield


@pytest.fixture
def pair() -> Iterator[Group]:
    """Yield a group of two ranks of which this process is the first, and alone: it can trace, but not communicate."""
    made = Group("pair", 0, 2, object())
    register_group(made)
    yield made
    forget_group(made)


@pytest.fixture(scope="module")
def toys_installed() -> Iterator[None]:
    """Install the package of toy models for a module's tests only: it registers plugins that would change others."""
    from helpers import toys

    with toys.installed(), forgetting_operations(toys.OPERATIONS):
        yield
