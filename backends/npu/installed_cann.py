"""The search for an installed CANN, without loading it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from .emulation import is_emulated

HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
"""Variables with the folder of an installed CANN."""
RUNTIME = "libascendcl.so"
LOADER_CACHE = Path("/etc/ld.so.cache")


def installed_cann(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return CANN's runtime library, in the environment's folders or the loader's cache; None if none is installed."""
    found = (folder / RUNTIME for folder in _folders(environ) if not is_emulated(folder))
    return next((library for library in found if library.exists()), None)


def _folders(environ: Mapping[str, str]) -> Iterator[Path]:
    yield from (Path(environ[name]) / "lib64" for name in HOMES if environ.get(name))
    yield from (Path(each) for each in environ.get("LD_LIBRARY_PATH", "").split(":") if each)
    if LOADER_CACHE.exists():
        names = re.findall(rb"[^\0]*/" + re.escape(RUNTIME.encode()) + rb"(?=\0)", LOADER_CACHE.read_bytes())
        yield from (Path(os.fsdecode(name)).parent for name in names)
