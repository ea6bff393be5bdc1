"""Libraries of C++ kernels for machines without a compiler, one for each instruction set: ``hal build-kernels``."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from hal.config import CompileCache, cache_folder, content_key
from hal.errors import ConfigError, DriverUnavailable

from .compiler import FLAGS, PREBUILT, compile_library, sources_key, target, try_instructions
from .processor import SETS, architecture, has, portable_flags, processor_line

log = logging.getLogger("hal.cpu")


def build(folder: Path, chosen: Collection[str] = ()) -> Iterator[Path]:
    """Compile a library for each instruction set of the compiler's processors, which may be others than this one.

    Args:
        folder: where to write them. Those of other sources, which the driver would not load, are removed.
        chosen: the sets; all by default.

    Yields:
        Each library, once it is written.

    Raises:
        ConfigError: the processors do not have a chosen set, or the folder cannot be written.
        DriverUnavailable: there is no compiler, it failed, or the driver knows no instruction sets of its processors.
    """
    machine = target()
    of = architecture(machine.partition("-")[0])
    sets = SETS.get(of)
    if sets is None:
        raise DriverUnavailable(
            f"the C++ compiler compiles for {machine}, of which the cpu driver has no instruction sets",
            f"set CXX to a compiler for {' or '.join(SETS)}",
        )
    if others := [each for each in chosen if each not in sets]:
        raise ConfigError(
            f"the C++ compiler compiles for {machine}, which has no instruction set {' or '.join(others)}",
            f"choose from {', '.join(sets)}, or set CXX to a compiler for other processors",
        )
    for name in chosen or sets:
        library = _library(folder, of, name)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch) / library.name
                compile_library(made, (*FLAGS, *portable_flags(of, name)))
                os.replace(made, library)
            for each in folder.glob(f"{of}-*.so"):
                if each.name.rpartition("-")[2] != library.name.rpartition("-")[2]:
                    each.unlink()
        except OSError as error:
            raise ConfigError(
                f"the library for {name} cannot be written: {error}",
                "name a writable folder, or free space on its disk",
            ) from error
        yield library


def highest(limit: str | None = None) -> Path | None:
    """Return the library of the highest instruction set that this processor has, up to a limit, or None."""
    names = list(SETS.get(architecture(), ()))
    allowed = names if limit is None else names[: names.index(limit) + 1]
    found = (_library(PREBUILT, architecture(), name) for name in reversed(allowed) if has(name))
    return next((each for each in found if each.exists()), None)


def try_once(library: Path) -> None:
    """Try a library's instructions in another process. The cache, if it can be written, notes that they are known.

    Raises:
        DriverUnavailable: this processor does not know all of them.
    """
    found = library.stat()
    key = content_key(library.name, str(found.st_size), str(found.st_mtime_ns), processor_line())
    try:
        CompileCache(cache_folder("cpu")).get_or_put(f"tried-{key}", lambda folder: try_instructions(library))
    except (ConfigError, OSError) as error:
        log.debug("that the C++ kernels were tried is not noted: %s", error)
        try_instructions(library)


def set_of(library: Path) -> str | None:
    """Return the instruction set that a library was prebuilt for; None if it was compiled for this processor."""
    return library.name.split("-")[1] if library.parent == PREBUILT else None


def _library(folder: Path, of: str, name: str) -> Path:
    return folder / f"{of}-{name}-{sources_key(*FLAGS)[:12]}.so"
