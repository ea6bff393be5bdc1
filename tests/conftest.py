"""Fixtures that many tests share."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# All of these are read when torch is imported, or before. torch would import torch_npu, which fails without a CANN.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
# Workers of pytest-xdist have the cores, so each has one thread, and Inductor's own workers would only import torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest

pytest.register_assert_rewrite("helpers")

from helpers import ROOT, TESTS, separate, thorough  # noqa: E402
from helpers.catalogue import forgetting_operations  # noqa: E402
from helpers.durations import Durations  # noqa: E402

import hal  # noqa: E402

# A job in the background of a script ignores interrupts, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tracing makes millions of objects that live on. If every 700 new ones are searched for cycles, as by default, that is
# a tenth of the suites' time.
gc.set_threshold(20_000, 10, 10)


THOROUGH: pytest.StashKey[tuple[Counter[tuple[str, str]], int]] = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Make this the process that the tests it was started for need, or refuse to."""
    kind = separate.check(config.args, config.invocation_params.dir)
    if kind == separate.CORE:
        # transformers imports torch_npu wherever that is installed, and without CANN the import fails: out of sight.
        sys.modules.setdefault("torch_npu", None)  # type: ignore[arg-type]
    elif not separate.unavailable():
        if kind == "backends/npu/driver":
            # One that is refused must not stop torch_npu's queue for the tests after it.
            os.environ.setdefault("TASK_QUEUE_ENABLE", "0")
        separate.activate()
    if config.pluginmanager.hasplugin("cacheprovider"):
        config.pluginmanager.register(Durations(config), "hal-durations")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Files that import torch_npu are skipped where it is not installed."""
    if separate.kind_of(module_path) == separate.CORE or not separate.unavailable():
        return None
    return separate.Unavailable.from_parent(parent, path=module_path)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves out, before -m chooses by marks."""
    ours = [item for item in items if item.path.is_relative_to(TESTS)]
    thorough.mark(ours, complete=not any("::" in argument for argument in config.args))
    config.stash[THOROUGH] = thorough.reasons(ours), len(ours)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Name what is not in this run, although its folder is."""
    return [
        f"not in this run, but by itself: pytest {folder}"
        for folder in separate.left_out(config.args, config.invocation_params.dir)
    ]


@pytest.fixture
def cpu() -> hal.Backend:
    """The CPU backend, active."""
    return hal.open("cpu")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def trained(repository: Path) -> Path:
    """The trained checkpoint."""
    return repository / "checkpoints" / "tiny-python"


@pytest.fixture
def forget_operations() -> Iterator[None]:
    """Take operations that a test declares out of the catalogue again, so that no other test meets them."""
    with forgetting_operations():
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--thorough``."""
    parser.addoption("--thorough", action="store_true", help="count what `make test` leaves to `make test-all`")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Count it, by file and reason."""
    if config.option.thorough:
        found, total = config.stash[THOROUGH]
        for (file, reason), count in sorted(found.items()):
            terminalreporter.write_line(f"{count:5}  {file}: {reason}")
        terminalreporter.write_line(f"{found.total():5}  of {total} tests")
