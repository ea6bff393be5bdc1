"""The error of benchmarks, and the import of optional libraries."""

from __future__ import annotations

import importlib
from typing import Any

from hal.config.optional_libraries import check_version
from hal.errors import HalError

DISTRIBUTIONS = {"llama_cpp": "llama-cpp-python"}
"""Distributions whose names are not those of their modules. pip builds them from source, so no extra names them."""


class BenchmarkError(HalError):
    """The benchmark cannot run here, or its results would be meaningless."""


def distribution_of(module: str) -> str:
    """Return the name under which pip installs a module."""
    package = module.partition(".")[0]
    return DISTRIBUTIONS.get(package, package)


def need(module: str, option: str) -> Any:
    """Import a library of the extra ``bench``, which ``option`` needs.

    Raises:
        BenchmarkError: the library is not installed or cannot be imported.
        ConfigError: its version is none that hal works with.
    """
    library = distribution_of(module)
    check_version(library, option)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        extra = "" if library in DISTRIBUTIONS.values() else " (or 'torch-hal[bench]')"
        raise BenchmarkError(
            f"{option} needs {library}, which cannot be imported: {error}",
            f"pip install {library}{extra}, or omit {option}",
        ) from error
