"""The system's C++ compiler, which compiles the libraries of drivers on the machine that uses them."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

from hal.config.compile_cache import content_key
from hal.errors import DriverUnavailable


def cxx_compiler(
    purpose: str, programs: tuple[str, ...], remedy: str, which: Callable[[str], str | None] = shutil.which
) -> list[str]:
    """Return ``CXX`` with its arguments, or the first of the programs that is on the PATH, as an absolute path.

    Args:
        purpose: what is compiled, for the error.
        programs: the programs to look for if the environment has no ``CXX``.
        remedy: what to do without a compiler.
        which: finds a program.

    Raises:
        DriverUnavailable: the program is not on the PATH.
    """
    chosen = shlex.split(os.environ.get("CXX", ""))
    candidates = [chosen] if chosen else [[each] for each in programs]
    for program, *arguments in candidates:
        if found := which(program):
            return [found, *arguments]
    names = " nor ".join(each[0] for each in candidates)
    raise DriverUnavailable(f"a compiler is needed for {purpose}, but there is no {names} on the PATH", remedy)


def compiler_key(compiler: Path) -> str:
    """Return a hash of a compiler's path, size and modification time, which an upgrade changes.

    Raises:
        OSError: the file does not exist.
    """
    found = compiler.stat()
    return content_key(str(compiler.resolve()), str(found.st_size), str(found.st_mtime_ns))[:8]
