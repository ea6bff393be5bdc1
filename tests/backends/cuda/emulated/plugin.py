"""The pytest plugin of `make test-cuda-emulated`: leaves out the tests that need a GPU's own nature, and says why."""

from __future__ import annotations

import pytest

DESELECTED = {
    "test_the_trained_checkpoint_gives_the_cpus_tokens[inductor]": (
        "so many tokens take the interpreter an hour; emulated/test_inductor.py takes fewer"
    ),
    "test_a_step_in_a_graph_takes_the_host_little_time": "times of the emulator say nothing of a GPU's",
    "test_launches_are_counted": "torch's profiler counts what CUPTI sees, and no kernel runs on a GPU",
}
"""The tests that cannot pass by their nature, and why: by name, with parameters where it is these that cannot."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect them."""
    left_out = [each for each in items if DESELECTED.keys() & {each.name, each.name.partition("[")[0]}]
    if left_out:
        items[:] = [each for each in items if each not in left_out]
        config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List them."""
    for test, reason in DESELECTED.items():
        terminalreporter.write_line(f"DESELECTED {test}: {reason}")
