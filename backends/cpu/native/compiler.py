"""Compilation of the C++ kernels, and the trial of a library's instructions."""

from __future__ import annotations

import itertools
import logging
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from hal.config import content_key, cxx_compiler
from hal.device.host_capacity import usable_cores
from hal.errors import DriverUnavailable

SOURCES = Path(__file__).parent
PREBUILT = SOURCES / "prebuilt"
"""Where the driver looks for a library on a machine without a compiler. Wheels contain its libraries."""
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fopenmp",
    "-fPIC",
    # Required to vectorize sums. NaN and infinity are preserved.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fassociative-math",
    "-fno-signed-zeros",
)
"""The compiler's flags on every processor."""

log = logging.getLogger("hal.cpu")


def sources_key(*parts: str) -> str:
    """Return a hash of the sources and of other parts."""
    sources = (part for path in _sources("*.cpp", "*.h") for part in (path.name, path.read_bytes()))
    return content_key(*parts, *sources)


def _sources(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in SOURCES.glob(pattern))


def compiler() -> list[str]:
    """Return ``CXX`` with its arguments, or g++ or c++; the program is an absolute path.

    Raises:
        DriverUnavailable: it is not on the PATH.
    """
    remedy = (
        "install g++, set CXX to another compiler, copy the libraries that `hal build-kernels` of this version writes "
        f"elsewhere to {PREBUILT}, or set the driver's option native to false"
    )
    return cxx_compiler("the C++ kernels of the cpu driver", ("g++", "c++"), remedy)


def target() -> str:
    """Return the processor, vendor and system that the compiler compiles for, such as x86_64-linux-gnu."""
    return _finished(_start([*compiler(), "-dumpmachine"])).strip()


def compile_library(library: Path, flags: Sequence[str]) -> None:
    """Compile the library into a file, several sources at a time.

    Raises:
        DriverUnavailable: there is no compiler, or it failed.
    """
    command = compiler()
    log.info("compiling the C++ kernels of the cpu driver with %s, which are then kept", " ".join(command))
    with tempfile.TemporaryDirectory() as parts:
        objects, running = [], list[subprocess.Popen[str]]()
        # Started by this thread: a child of another thread may hang under an emulated processor.
        try:
            for source in sorted(_sources("*.cpp"), key=lambda each: each.stat().st_size, reverse=True):
                objects.append(str(Path(parts) / f"{source.stem}.o"))
                if len(running) == usable_cores():
                    _finish_first(running)
                running.append(_start([*command, *flags, "-c", str(source), "-o", objects[-1]]))
            while running:
                _finish_first(running)
        finally:
            for each in running:  # If one failed, the others still write into the folder.
                each.communicate()
        _finished(_start([*command, *flags, "-shared", *sorted(objects), "-o", str(library)]))


_TRIAL = """
import ctypes, sys
*_, library = map(ctypes.CDLL, sys.argv[1:])
library.instructions.restype = ctypes.c_char_p
print(library.instructions().decode(), flush=True)
library.try_instructions()
"""


def try_instructions(library: Path) -> None:
    """Run each kind of instruction of a library in another process, which an unknown one ends.

    The compiler uses what the processor, an emulator or a virtual machine says that it has.

    Raises:
        DriverUnavailable: the processor does not know all of them.
    """
    openmp = Path(torch.__file__).parent.glob("lib/libgomp.so.*")  # a machine without a compiler may have no other
    try:
        command = [sys.executable, "-S", "-c", _TRIAL, *map(str, openmp), str(library)]
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError as error:
        log.debug("the C++ kernels are not tried in another process: %s", error)
        return
    if done.returncode > 0:
        log.debug("the C++ kernels are not tried in another process: %s", done.stderr.decode(errors="replace").strip())
    if done.returncode < 0:
        sets = ", ".join(done.stdout.decode().split())
        raise DriverUnavailable(
            f"the C++ kernels of the cpu driver for {sets} end in {signal.Signals(-done.returncode).name}: this "
            f"processor, {platform.machine()}, does not know all instructions that it reports",
            "set the driver's option instructions to a lower set, such as avx2, or native to false",
        )


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _finish_first(running: list[subprocess.Popen[str]]) -> None:
    """Wait until one of the compilers has ended, and remove it."""
    for each in itertools.cycle(running):
        with suppress(subprocess.TimeoutExpired):
            _finished(each, timeout=0.02)
            running.remove(each)
            return


def _finished(process: subprocess.Popen[str], timeout: float | None = None) -> str:
    """Return what a compiler printed. If it still runs after ``timeout`` seconds, TimeoutExpired is raised."""
    printed, errors = process.communicate(timeout=timeout)
    if process.returncode:
        other = "set CXX to another compiler"
        if "'-fopenmp'" in errors or "omp.h" in errors:  # Apple's clang, or one without its OpenMP
            other = "set CXX to a compiler with OpenMP, such as g++-15 after `brew install gcc` on macOS"
        raise DriverUnavailable(
            f"{shlex.join(process.args)} failed:\n{errors.strip()[-2000:]}",  # type: ignore[arg-type]
            f"repair the compiler, {other}, or set the driver's option native to false",
        )
    return printed
