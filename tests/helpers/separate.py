"""Runs tests that need the emulated CANN in separate processes, and loads it for torch_npu there."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from helpers import ROOT, TESTS

SEPARATE = ("backends/npu/driver",)
"""Folders, under tests/, one to a process. `norecursedirs` in setup.cfg keeps them out of the others' process."""
CORE = "tests"
"""The kind of all other folders."""


def kind_of(path: Path) -> str:
    """Return the folder of :data:`SEPARATE` that contains the path, or :data:`CORE`."""
    return next((folder for folder in SEPARATE if path.is_relative_to(TESTS / folder)), CORE)


def check(arguments: Iterable[str], invoked_in: Path) -> str:
    """Return the kind of process that pytest's arguments need.

    Raises:
        pytest.UsageError: they need different kinds.
    """
    by_kind: dict[str, list[str]] = {}
    for argument in arguments:
        path = Path(os.path.abspath(invoked_in / argument.partition("::")[0]))
        by_kind.setdefault(kind_of(path), []).append(argument)
    if len(by_kind) > 1:
        commands = "\n".join(f"  pytest {' '.join(given)}" for given in by_kind.values())
        raise pytest.UsageError(
            "these tests cannot run in one process: the emulated CANN is loaded for torch_npu in a whole process, "
            "and tests of the NPU driver and all others need different setups. Run separately:\n" + commands
        )
    return next(iter(by_kind), CORE)


def unavailable() -> str:
    """Return why the emulated CANN cannot be used on this machine, or an empty string."""
    if sys.platform != "linux":
        return f"the emulated CANN needs Linux, and this is {sys.platform}"
    if importlib.util.find_spec("torch_npu") is None:
        return (
            "torch_npu is not installed: run .venv/npu/bin/python, which make test creates, or pip install -e "
            "emulated-cann -e '.[npu]'"
        )
    if importlib.util.find_spec("emulated_cann") is None:
        return "emulated_cann is not installed: run make .venv/.test, or pip install -e emulated-cann"
    from hal.backends.npu.torch_build import refused_build

    refused = refused_build()
    return f"{refused.reason}: {refused.hint}" if refused else ""


def keep_cache() -> None:
    """Have the emulated CANN keep its libraries where its own tests keep them, if it is installed."""
    if importlib.util.find_spec("emulated_cann") is not None:
        from emulated_cann.library_cache import CACHE_DIR, cache_folder

        os.environ.setdefault(CACHE_DIR, str(cache_folder()))


def activate() -> None:
    """Load the emulated CANN for torch_npu in this process and its subprocesses."""
    import emulated_cann

    emulated_cann.activate(devices=2)


class Unavailable(pytest.Module):
    """A file that is skipped, with the reason, because it cannot be imported."""

    def collect(self) -> Iterator[pytest.Item]:
        raise pytest.skip.Exception(unavailable(), allow_module_level=True)


def left_out(arguments: Iterable[str], invoked_in: Path) -> list[str]:
    """Return folders under the arguments whose tests need another process."""
    paths = [Path(os.path.abspath(invoked_in / argument.partition("::")[0])) for argument in arguments]
    folders = [TESTS / folder for folder in SEPARATE]
    return [
        str(folder.relative_to(ROOT))
        for folder in folders
        if any(folder != path and folder.is_relative_to(path) for path in paths)
    ]
