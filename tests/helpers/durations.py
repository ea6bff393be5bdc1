"""A pytest plugin that runs files in order of their last duration, longest first.

A worker of pytest-xdist takes a whole file, so a long one that starts last would leave the other workers idle.
Durations are stored in pytest's cache. A file that is not in it runs first.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

KEY = "hal/seconds_by_file"


class Durations:
    """Reads the durations from pytest's cache, and writes them after the run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._worker = hasattr(config, "workerinput")
        self._known: dict[str, float] = {}
        self._took: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Give all workers the same durations, because the cache can change during the run."""
        config: Any = self._config
        self._known = config.workerinput[KEY] if self._worker else config.cache.get(KEY, {})

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Pass the durations to a worker that pytest-xdist starts."""
        node.workerinput[KEY] = self._known

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort the files. The order within a file, and among files of the same duration, does not change."""
        items.sort(key=lambda item: -self._known.get(item.nodeid.partition("::")[0], float("inf")))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._took[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Store the durations. A run of some tests of a file reduces its stored duration only gradually."""
        if not self._worker:
            longer = {file: max(took, self._known.get(file, 0.0) * 0.8) for file, took in self._took.items()}
            config: Any = self._config
            config.cache.set(KEY, {**self._known, **longer})
