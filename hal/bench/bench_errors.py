"""The error of benchmarks, and the import of optional libraries."""

from __future__ import annotations

import importlib
from typing import Any

from hal.config.optional_libraries import check_version
from hal.errors import HalError


class BenchmarkError(HalError):
    """The benchmark cannot run here, or its results would be meaningless."""


def need(module: str, option: str) -> Any:
    """Import a library of the extra ``bench``, which ``option`` needs.

    Raises:
        BenchmarkError: the library is not installed or cannot be imported.
        ConfigError: its version is none that hal works with.
    """
    check_version(module.partition(".")[0], option)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise BenchmarkError(
            f"{option} needs {library}, which cannot be imported: {error}",
            f"pip install {library} (or 'torch-hal[bench]'), or omit {option}",
        ) from error
