"""Compiling the C++ kernels with the system's compiler: once for each machine, Python side unaware."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from hal.config import cache_folder, is_own, private_folder
from hal.errors import ConfigError, DriverUnavailable

SOURCES = Path(__file__).parent
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared",
    # What a compiler needs to vectorise sums. NaN and infinity keep their meaning.
    "-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros",
)  # fmt: skip

log = logging.getLogger("hal.cpu")


@functools.cache
def load() -> ctypes.CDLL:
    """The library of kernels, compiled now unless a cache holds it (about 3 seconds).

    The cache is ``$HAL_CACHE_DIR``, or ``torch-hal`` in ``$XDG_CACHE_HOME`` or ``~/.cache``. What others could have
    written there is not loaded.

    Raises:
        DriverUnavailable: there is no C++ compiler, it failed, or the cache cannot be written.
    """
    try:
        folder = cache_folder("cpu")
    except ConfigError as error:
        raise DriverUnavailable(error.problem, f"{error.remedy}, or the driver's option native to false") from error
    library = folder / f"kernels-{_fingerprint()}.so"
    try:
        if not private_folder(folder):
            log.warning(
                "others may write in %s: the C++ kernels are not kept there, and compiled at each start", folder
            )
            with tempfile.TemporaryDirectory() as own:
                _compile(Path(own) / library.name)
                return ctypes.CDLL(str(Path(own) / library.name))  # which stays when its file goes
        if library.exists() and not is_own(library):
            log.warning("%s is not this user's alone, and is compiled again", library)
        elif library.exists():
            try:
                return ctypes.CDLL(str(library))
            except OSError as error:
                log.warning("%s is damaged and is compiled again: %s", library, error)
        _compile(library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise DriverUnavailable(
            f"the C++ kernels of the cpu driver cannot be kept in {library.parent}: {error}",
            "set HAL_CACHE_DIR to a folder that can be written, or the driver's option native to false",
        ) from error


def _fingerprint() -> str:
    """Of everything that decides what the compiler makes: the processor too, for which it tunes."""
    content = [FLAGS, platform.machine(), _processor(), os.environ.get("CXX", "")]
    content += [(path.name, path.read_text(encoding="utf-8")) for path in _sources("*.cpp", "*.h")]
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _sources(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in SOURCES.glob(pattern))


def _compiler() -> list[str]:
    """``CXX``, which may have arguments, or else g++ or c++."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    candidates = [chosen] if chosen else [["g++"], ["c++"]]
    found = next((each for each in candidates if shutil.which(each[0])), None)
    if found is None:
        names = " nor ".join(each[0] for each in candidates)
        raise DriverUnavailable(
            f"the C++ kernels of the cpu driver need a compiler, and there is no {names}",
            "install g++, set CXX to another, or set the driver's option native to false",
        )
    return found


def _compile(library: Path) -> None:
    compiler = _compiler()
    log.info("compiling the C++ kernels of the cpu driver with %s, once", " ".join(compiler))
    # Made beside its place and moved there, so that no other process ever loads half of it.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [*compiler, *FLAGS, *map(str, _sources("*.cpp")), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DriverUnavailable(
                f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}",
                "repair the compiler, choose another with CXX, or set the driver's option native to false",
            )
        made.chmod(0o700)
        made.replace(library)
