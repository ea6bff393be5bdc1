"""Compilation of the C++ kernels with the system's compiler for a processor's features, and their cache."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from hal.config import CompileCache, cache_folder, compiler_key, content_key
from hal.device.host_capacity import usable_cores
from hal.errors import ConfigError, DriverUnavailable


def processor_line() -> str:
    """Return a line that lists the processor's features, or at least names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def processor_flags() -> frozenset[str]:
    """Return the features in Linux's names, such as avx2; empty on other systems."""
    return _listed() - unusable_flags()


def unusable_flags() -> frozenset[str]:
    """Return the features that the system lists and the processor does not have: an emulated one has fewer."""
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # since torch 2.11
    asked = {name.replace("_", ""): bool(has) for name, has in capabilities.items()}
    return frozenset(name for name in _listed() if not asked.get(name.replace("_", ""), True))


def _listed() -> frozenset[str]:
    return frozenset(processor_line().partition(":")[2].split())


InstructionSet = Literal["amx", "avx512_bf16", "avx512", "avx2", "sse4"]

_WITHOUT_AMX = ("-mno-amx-tile",)
_FLAGS: dict[InstructionSet, tuple[str, ...]] = {
    "amx": (),
    "avx512_bf16": _WITHOUT_AMX,
    "avx512": (*_WITHOUT_AMX, "-mno-avx512bf16"),
    "avx2": (*_WITHOUT_AMX, "-mno-avx512f"),
    "sse4": (*_WITHOUT_AMX, "-mno-avx"),
}
_NEEDED: dict[InstructionSet, tuple[str, ...]] = {
    "amx": ("amx_tile", "amx_bf16", "amx_int8"),
    "avx512_bf16": ("avx512_bf16",),
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "avx2": ("avx2", "fma"),
    "sse4": ("sse4_2",),
}


def compiler_flags(highest: InstructionSet | None) -> tuple[str, ...]:
    """Return the compiler's flags that limit instructions to a set and those below it; None allows all.

    The compiler asks the processor itself, so that it also needs to know what an emulated processor lacks.

    Raises:
        DriverUnavailable: the processor does not have the set.
    """
    unusable = sorted(each for each in unusable_flags() if each.startswith(("avx", "amx")))
    without = tuple("-mno-" + each.replace("amx_", "amx-").replace("_", "") for each in unusable)
    if highest is None:
        return without
    flags = processor_flags()
    missing = [name for name in _NEEDED[highest] if name not in flags]
    if platform.machine() not in ("x86_64", "AMD64") or missing:
        raise DriverUnavailable(
            f"the cpu driver's option instructions is {highest}, but this processor, {platform.machine()}, has no "
            f"{' or '.join(missing or _NEEDED[highest])}",
            "omit the option, or choose a lower instruction set",
        )
    return (*without, *_FLAGS[highest])


_HWCAPS = {"lse": (16, 8), "fp16": (16, 10), "dotprod": (16, 20)}
"""What Linux says of an Arm processor: the entry of the auxiliary vector and its bit, by the compiler's name."""


def architecture() -> str:
    """Return the compiler's flag for this processor. On Arm, Linux is asked: a cross compiler knows no ``native``."""
    if platform.machine() != "aarch64" or not sys.platform.startswith("linux"):
        return "-march=native"
    ask = ctypes.CDLL(None).getauxval
    ask.argtypes, ask.restype = [ctypes.c_ulong], ctypes.c_ulong
    found = [name for name, (entry, bit) in _HWCAPS.items() if ask(entry) >> bit & 1]
    return "+".join(("-march=armv8.2-a" if "dotprod" in found else "-march=armv8-a", *found))


SOURCES = Path(__file__).parent
LIBRARY = "kernels.so"
FLAGS = (
    "-std=c++17",
    "-O3",
    architecture(),
    "-fopenmp",
    "-fPIC",
    # Required to vectorize sums. NaN and infinity are preserved.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fassociative-math",
    "-fno-signed-zeros",
)

log = logging.getLogger("hal.cpu")


@functools.cache
def load(instructions: InstructionSet | None = None) -> ctypes.CDLL:
    """Load the library of kernels. If it is not cached, compile it, which takes some 15 seconds.

    Args:
        instructions: the highest instruction set to use; None allows all of the processor's.

    Raises:
        DriverUnavailable: there is no C++ compiler, it failed, or the cache cannot be written; or the processor does
            not have the instruction set.
    """
    flags = (*FLAGS, *compiler_flags(instructions))
    try:
        cache = CompileCache(cache_folder("cpu"))
    except ConfigError as error:
        raise DriverUnavailable(error.problem, f"{error.remedy}, or the driver's option native to false") from error
    try:
        return _load(_compiled(cache, flags) / LIBRARY)
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
            f"remove {library.parent} to compile them again, or set the driver's option native to false",
        ) from error


def _compiled(cache: CompileCache, flags: Sequence[str]) -> Path:
    key = _sources_key(flags)
    try:
        compiler = _compiler()
    except DriverUnavailable:
        # A library from another machine's compiler will do, such as the one that built the container's image.
        if (found := cache.latest(f"{key}-")) is None:
            raise
        return found
    return cache.get_or_put(f"{key}-{compiler_key(Path(compiler[0]))}", partial(_compile, flags=flags))


def _sources_key(flags: Sequence[str]) -> str:
    """Return a hash of everything that determines the library except the compiler.

    This includes the processor, which the compiler asks.
    """
    sources = (part for path in _sources("*.cpp", "*.h") for part in (path.name, path.read_bytes()))
    return content_key(*flags, platform.machine(), processor_line(), os.environ.get("CXX", ""), *sources)


def _sources(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in SOURCES.glob(pattern))


def _compiler() -> list[str]:
    """Return ``CXX`` with its arguments, or g++ or c++; the program is an absolute path."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    candidates = [chosen] if chosen else [["g++"], ["c++"]]
    for program, *arguments in candidates:
        if found := shutil.which(program):
            return [found, *arguments]
    names = " nor ".join(each[0] for each in candidates)
    raise DriverUnavailable(
        f"the C++ kernels of the cpu driver need a compiler, but there is no {names} on the PATH",
        "install g++, set CXX to another compiler, or set the driver's option native to false",
    )


def _compile(folder: Path, flags: Sequence[str]) -> None:
    """Compile the library into a folder, several sources at a time."""
    compiler = _compiler()
    log.info("compiling the C++ kernels of the cpu driver with %s; the cache keeps them", " ".join(compiler))
    with tempfile.TemporaryDirectory() as parts:
        objects, running = [], deque[subprocess.Popen[str]]()
        # Started by this thread: a child of another thread may hang under an emulated processor.
        try:
            for source in _sources("*.cpp"):
                objects.append(str(Path(parts) / f"{source.stem}.o"))
                if len(running) == usable_cores():
                    _finish(running.popleft())
                running.append(_start([*compiler, *flags, "-c", str(source), "-o", objects[-1]]))
            while running:
                _finish(running.popleft())
        finally:
            for each in running:  # If one failed, the others still write into the folder.
                each.communicate()
        _finish(_start([*compiler, *flags, "-shared", *objects, "-o", str(folder / LIBRARY)]))
        try_instructions(folder / LIBRARY)


def try_instructions(library: Path) -> None:
    """Run each kind of instruction of a library in another process, which an unknown one ends.

    The compiler uses what the processor, an emulator or a virtual machine says that it has.

    Raises:
        DriverUnavailable: the processor does not know all of them.
    """
    program = "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]); library.try_instructions()"
    try:
        done = subprocess.run([sys.executable, "-S", "-c", program, str(library)], capture_output=True, check=False)
    except OSError as error:
        log.debug("the C++ kernels are not tried in another process: %s", error)
        return
    if done.returncode > 0:
        log.debug("the C++ kernels are not tried in another process: %s", done.stderr.decode(errors="replace").strip())
    if done.returncode < 0:
        raise DriverUnavailable(
            f"the C++ kernels of the cpu driver end in {signal.Signals(-done.returncode).name}: this processor, "
            f"{platform.machine()}, does not know all instructions that it reports",
            "set the driver's option instructions to a lower set, such as avx2, or native to false",
        )


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str]) -> None:
    printed = process.communicate()[1]
    if process.returncode:
        raise DriverUnavailable(
            f"{shlex.join(process.args)} failed:\n{printed.strip()[-2000:]}",  # type: ignore[arg-type]
            "repair the compiler, set CXX to another compiler, or set the driver's option native to false",
        )
