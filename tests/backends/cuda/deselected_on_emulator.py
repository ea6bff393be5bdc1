"""Pytest plugin of `make test-cuda-emulated`: deselects tests that need a real GPU, and lists them with reasons."""

from __future__ import annotations

import pytest

DESELECTED = {
    "test_the_trained_checkpoint_gives_the_cpus_tokens[inductor]": (
        "so many tokens take the interpreter an hour; test_cuda_gpu_inductor.py takes fewer"
    ),
    "test_a_step_in_a_graph_takes_the_host_little_time": "times of the emulator say nothing of a GPU's",
    "test_launches_are_counted": "torch's profiler counts what CUPTI sees, and no kernel runs on a GPU",
}
"""Tests that need a real GPU, with the reason: by name, with parameters if only these need one."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that need a real GPU."""
    left_out = [each for each in items if DESELECTED.keys() & {each.name, each.name.partition("[")[0]}]
    if left_out:
        items[:] = [each for each in items if each not in left_out]
        config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the deselected tests."""
    for test, reason in DESELECTED.items():
        terminalreporter.write_line(f"DESELECTED {test}: {reason}")
