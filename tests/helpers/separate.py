"""The tests that need a process of their own, in which an emulated CANN lies under torch_npu, and how they get one."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from helpers import ROOT, TESTS

SEPARATE = ("backends/npu/driver", "backends/npu/emulator")
"""Folders, under tests/, one to a process. `norecursedirs` in setup.cfg keeps them out of the others' process."""
CORE = "tests"
"""What stands for all other folders."""


def kind_of(path: Path) -> str:
    """The folder of :data:`SEPARATE` that the path is in, or :data:`CORE`."""
    return next((folder for folder in SEPARATE if path.is_relative_to(TESTS / folder)), CORE)


def check(arguments: Iterable[str], invoked_in: Path) -> str:
    """The kind of the one process that all arguments, as pytest was given them, may share.

    Raises:
        pytest.UsageError: there is no such process.
    """
    by_kind: dict[str, list[str]] = {}
    for argument in arguments:
        path = Path(os.path.abspath(invoked_in / argument.partition("::")[0]))
        by_kind.setdefault(kind_of(path), []).append(argument)
    if len(by_kind) > 1:
        commands = "\n".join(f"  pytest {' '.join(given)}" for given in by_kind.values())
        raise pytest.UsageError(
            "these tests cannot run in one process: the emulated CANN is put under torch_npu for a whole process, "
            "which tests of the NPU driver, of the emulator, and all others each want otherwise. Run one by one:\n"
            + commands
        )
    return next(iter(by_kind), CORE)


def unavailable() -> str:
    """Why no emulated CANN can be used on this machine, or nothing."""
    if sys.platform != "linux":
        return f"the emulated CANN needs Linux, and this is {sys.platform}"
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed: pip install -e '.[npu]'"
    return ""


def activate() -> None:
    """Put the emulated CANN under torch_npu, for this process and those that it starts."""
    from hal.backends.npu import emulator

    emulator.activate(devices=2)


class Unavailable(pytest.Module):
    """A file that is not imported, because it could not be: skipped, with the reason."""

    def collect(self) -> Iterator[pytest.Item]:
        raise pytest.skip.Exception(unavailable(), allow_module_level=True)


def left_out(arguments: Iterable[str], invoked_in: Path) -> list[str]:
    """Folders under the arguments whose tests do not run with theirs."""
    paths = [Path(os.path.abspath(invoked_in / argument.partition("::")[0])) for argument in arguments]
    folders = [TESTS / folder for folder in SEPARATE]
    return [
        str(folder.relative_to(ROOT))
        for folder in folders
        if any(folder != path and folder.is_relative_to(path) for path in paths)
    ]
