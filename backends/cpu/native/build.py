"""The library of C++ kernels: compiled for this processor and cached, or prebuilt."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hal.config import CompileCache, cache_folder, compiler_key
from hal.errors import ConfigError, DriverUnavailable

from . import prebuilt
from .compiler import FLAGS, compile_library, compiler, sources_key, try_instructions
from .processor import InstructionSet, native_flags, processor_line

LIBRARY = "kernels.so"

log = logging.getLogger("hal.cpu")


@functools.cache
def load(instructions: InstructionSet | None = None) -> ctypes.CDLL:
    """Load the library of kernels. If it is not cached, compile it, which takes half a minute on two cores.

    Without a compiler, load one that was compiled before on such a processor, or else the highest prebuilt one.

    Args:
        instructions: the highest instruction set to use; None allows all of the processor's.

    Raises:
        DriverUnavailable: there is neither a C++ compiler nor a library, the compiler failed, or the cache cannot be
            written; or the processor does not have the instruction set, or not all that it reports.
    """
    flags = (*FLAGS, *native_flags(instructions))
    try:
        found = compiler()
    except DriverUnavailable:
        library = _cached(flags)
        if library is None and (library := prebuilt.highest(instructions)) is not None:
            prebuilt.try_once(library)
        if library is None:
            raise
        return _load(library)
    try:
        cache = CompileCache(cache_folder("cpu"))
    except ConfigError as error:
        raise DriverUnavailable(error.problem, f"{error.remedy}, or the driver's option native to false") from error
    try:
        return _load(_compiled(cache, flags, Path(found[0])))
    except ConfigError as error:
        log.warning("%s: the C++ kernels are compiled at each start; %s", error.problem, error.remedy)
        with tempfile.TemporaryDirectory() as own:
            _compile(Path(own), flags)
            return ctypes.CDLL(str(Path(own) / LIBRARY))  # stays loaded after its file is deleted
    except OSError as error:
        raise DriverUnavailable(
            f"the C++ kernels of the cpu driver cannot be stored in {cache.folder}: {error}",
            "set HAL_CACHE_DIR to a writable folder, or the driver's option native to false",
        ) from error


def _load(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise DriverUnavailable(
            f"the C++ kernels of the cpu driver cannot be loaded from {library}: {error}",
            "remove it if it is damaged, run `hal build-kernels` on an older system if it was made on a newer one than "
            "this, or set the driver's option native to false",
        ) from error


def _cached(flags: Sequence[str]) -> Path | None:
    """Return a library that another machine's compiler made, such as the one that built the container's image."""
    try:
        found = CompileCache(cache_folder("cpu")).latest(f"{_key(flags)}-")
    except (ConfigError, OSError) as error:
        log.debug("the cache has no C++ kernels: %s", error)
        return None
    return None if found is None else found / LIBRARY


def _compiled(cache: CompileCache, flags: Sequence[str], program: Path) -> Path:
    return cache.get_or_put(f"{_key(flags)}-{compiler_key(program)}", partial(_compile, flags=flags)) / LIBRARY


def _key(flags: Sequence[str]) -> str:
    """Return a hash of everything that determines the library except the compiler.

    This includes the processor, which the compiler asks.
    """
    return sources_key(*flags, platform.machine(), processor_line(), os.environ.get("CXX", ""))


def _compile(folder: Path, flags: Sequence[str]) -> None:
    compile_library(folder / LIBRARY, flags)
    try_instructions(folder / LIBRARY)
