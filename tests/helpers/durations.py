"""A pytest plugin: files begin in the order of how long they took last time, the longest first.

Workers of pytest-xdist take whole files: one that is begun last would leave the others idle. What a file took is kept
in pytest's cache, between runs; a file that is not in it begins first.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

KEY = "hal/seconds_by_file"


class Durations:
    """Reads pytest's cache for the order, and writes it after the run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._worker = hasattr(config, "workerinput")
        self._known: dict[str, float] = {}
        self._took: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """A worker is told, so that all workers have one order, whoever writes the cache meanwhile."""
        config: Any = self._config
        self._known = config.workerinput[KEY] if self._worker else config.cache.get(KEY, {})

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """pytest-xdist starts a worker."""
        node.workerinput[KEY] = self._known

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """The order within a file stays, and among files that took as long."""
        items.sort(key=lambda item: -self._known.get(item.nodeid.partition("::")[0], float("inf")))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._took[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        """A few tests of a file, run alone, do not make the file short at once."""
        if not self._worker:
            longer = {file: max(took, self._known.get(file, 0.0) * 0.8) for file, took in self._took.items()}
            config: Any = self._config
            config.cache.set(KEY, {**self._known, **longer})
