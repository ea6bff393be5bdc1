"""What goes wrong in a benchmark, and libraries that only benchmarks need."""

from __future__ import annotations

import importlib
from typing import Any

from hal.errors import HalError


class BenchmarkError(HalError):
    """A benchmark that cannot be run here, or whose figures would mean nothing."""


def need(module: str, option: str) -> Any:
    """Import a library of the extra ``bench``.

    By name, because nothing in hal depends on it: it is what ``option`` asks to compare with, or to draw with.

    Raises:
        BenchmarkError: it is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise BenchmarkError(
            f"{option} needs {library}, which cannot be imported: {error}",
            f"pip install {library} (or 'torch-hal[bench]'), or leave {option} out",
        ) from error
