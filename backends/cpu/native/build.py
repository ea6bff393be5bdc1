"""Compile the C++ kernels with the system's compiler, once, and load them."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from hal.config import CompileCache, cache_folder, compiler_key, content_key
from hal.errors import ConfigError, DriverUnavailable

SOURCES = Path(__file__).parent
LIBRARY = "kernels.so"
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared",
    # What a compiler needs to vectorise sums. NaN and infinity keep their meaning.
    "-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros",
)  # fmt: skip

log = logging.getLogger("hal.cpu")


@functools.cache
def load() -> ctypes.CDLL:
    """Load the library of kernels. Compile it if the cache does not hold it, which takes about 3 seconds.

    Raises:
        DriverUnavailable: there is no C++ compiler, it failed, or the cache cannot be written.
    """
    try:
        cache = CompileCache(cache_folder("cpu"))
    except ConfigError as error:
        raise DriverUnavailable(error.problem, f"{error.remedy}, or the driver's option native to false") from error
    try:
        return _load(_compiled(cache) / LIBRARY)
    except ConfigError as error:
        log.warning("%s: the C++ kernels are compiled at each start; %s", error.problem, error.remedy)
        with tempfile.TemporaryDirectory() as own:
            _compile(Path(own))
            return ctypes.CDLL(str(Path(own) / LIBRARY))  # which stays when its file goes
    except OSError as error:
        raise DriverUnavailable(
            f"the C++ kernels of the cpu driver cannot be kept in {cache.folder}: {error}",
            "set HAL_CACHE_DIR to a folder that can be written, or the driver's option native to false",
        ) from error


def _load(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise DriverUnavailable(
            f"the C++ kernels of the cpu driver do not load from {library}: {error}",
            f"remove {library.parent}, so that they are compiled again, or set the driver's option native to false",
        ) from error


def _compiled(cache: CompileCache) -> Path:
    key = _sources_key()
    try:
        compiler = _compiler()
    except DriverUnavailable:
        # What the compiler of another machine made, such as the one that built this container's image, serves too.
        if (found := cache.latest(f"{key}-")) is None:
            raise
        return found
    return cache.get_or_put(f"{key}-{compiler_key(Path(compiler[0]))}", _compile)


def _sources_key() -> str:
    """A hash of everything but the compiler that decides what is compiled: also the processor, by -march=native."""
    sources = (part for path in _sources("*.cpp", "*.h") for part in (path.name, path.read_bytes()))
    return content_key(*FLAGS, platform.machine(), _processor(), os.environ.get("CXX", ""), *sources)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _sources(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in SOURCES.glob(pattern))


def _compiler() -> list[str]:
    """Return ``CXX``, which may have arguments, or else g++ or c++; the program as an absolute path."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    candidates = [chosen] if chosen else [["g++"], ["c++"]]
    for program, *arguments in candidates:
        if found := shutil.which(program):
            return [found, *arguments]
    names = " nor ".join(each[0] for each in candidates)
    raise DriverUnavailable(
        f"the C++ kernels of the cpu driver need a compiler, and there is no {names}",
        "install g++, set CXX to another, or set the driver's option native to false",
    )


def _compile(folder: Path) -> None:
    """Write the library into a folder."""
    compiler = _compiler()
    log.info("compiling the C++ kernels of the cpu driver with %s, once", " ".join(compiler))
    command = [*compiler, *FLAGS, *map(str, _sources("*.cpp")), "-o", str(folder / LIBRARY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DriverUnavailable(
            f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}",
            "repair the compiler, choose another with CXX, or set the driver's option native to false",
        )
