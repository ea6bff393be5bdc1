"""A pytest plugin that marks the cases of :mod:`helpers.thorough`, and orders files by their last duration."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from helpers import ROOT, thorough
from helpers.durations import Durations

THOROUGH: pytest.StashKey[tuple[Counter[tuple[str, str]], int]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--thorough``."""
    parser.addoption("--thorough", action="store_true", help="count what `make test` leaves to `make test-all`")


def pytest_configure(config: pytest.Config) -> None:
    """Order files by their durations, which pytest's cache has."""
    if config.pluginmanager.hasplugin("cacheprovider"):
        config.pluginmanager.register(Durations(config), "hal-durations")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that `make test` leaves out, before -m selects by mark."""
    ours = [item for item in items if item.path.is_relative_to(ROOT)]
    thorough.mark(ours, complete=not any("::" in argument for argument in config.args))
    config.stash[THOROUGH] = thorough.reasons(ours), len(ours)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the number of thorough cases, by file and reason."""
    if config.option.thorough:
        found, total = config.stash[THOROUGH]
        for (file, reason), count in sorted(found.items()):
            terminalreporter.write_line(f"{count:5}  {file}: {reason}")
        terminalreporter.write_line(f"{found.total():5}  of {total} tests")
