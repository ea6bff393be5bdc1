"""What the processor has, its instruction sets, and the compiler's flags for them."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from hal.errors import DriverUnavailable

InstructionSet = Literal["amx", "avx512_bf16", "avx512", "avx2", "sse4"]

SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "sse4": ("sse4_2", "popcnt"),
        "avx2": ("avx2", "fma", "f16c"),
        "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
        "avx512_bf16": ("avx512_bf16", "avx512_vnni"),
        "amx": ("amx_tile", "amx_bf16", "amx_int8", "avx512vbmi"),
    },
    "aarch64": {"armv8": (), "armv8.2": ("lse", "fp16", "dotprod")},
}
"""The instruction sets of each architecture, in ascending order: the features that one adds to those below it."""

_NAMES = {"AMD64": "x86_64", "arm64": "aarch64"}
_FLAGS: dict[InstructionSet, tuple[str, ...]] = {
    "amx": (),
    "avx512_bf16": ("-mno-amx-tile",),
    "avx512": ("-mno-amx-tile", "-mno-avx512bf16"),
    "avx2": ("-mno-amx-tile", "-mno-avx512f"),
    "sse4": ("-mno-amx-tile", "-mno-avx"),
}
_HWCAPS = {"lse": 8, "fp16": 10, "dotprod": 20}
"""Features of Arm's processors, by the compiler's names, and their bits in the entry AT_HWCAP of Linux."""
_AT_HWCAP = 16


def architecture(name: str | None = None) -> str:
    """Return SETS' name of an architecture, from that of a system or a compiler; by default, of this processor's."""
    name = name or platform.machine()
    return _NAMES.get(name, name)


def processor_line() -> str:
    """Return a line that lists the processor's features, or at least names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def processor_flags() -> frozenset[str]:
    """Return the features: in Linux's names on x86, such as avx2, and in the compiler's on Arm; empty if unknown."""
    if architecture() != "aarch64":
        return _listed() - unusable_flags()
    if not sys.platform.startswith("linux"):
        return frozenset(_HWCAPS if sys.platform == "darwin" else ())  # Apple's M1 has all
    ask = ctypes.CDLL(None).getauxval
    ask.argtypes, ask.restype = [ctypes.c_ulong], ctypes.c_ulong
    return frozenset(name for name, bit in _HWCAPS.items() if ask(_AT_HWCAP) >> bit & 1)


def unusable_flags() -> frozenset[str]:
    """Return the features that the system lists and the processor does not have: an emulated one has fewer."""
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # since torch 2.11
    asked = {name.replace("_", ""): bool(has) for name, has in capabilities.items()}
    return frozenset(name for name in _listed() if not asked.get(name.replace("_", ""), True))


def _listed() -> frozenset[str]:
    return frozenset(processor_line().partition(":")[2].split())


def features_of(of: str, name: str) -> list[str]:
    """Return the features of a set of an architecture: its own, then those of the sets below it."""
    sets = SETS.get(of, {})
    names = list(sets)
    below = names[: names.index(name) + 1] if name in names else []
    return [feature for each in reversed(below) for feature in sets[each]]


def has(name: str) -> bool:
    """Return whether this processor has a set of its architecture."""
    return processor_flags().issuperset(features_of(architecture(), name))


def native_flags(highest: InstructionSet | None) -> tuple[str, ...]:
    """Return the compiler's flags for this processor, up to an instruction set; None allows all.

    The compiler asks an x86 processor itself, so that it also needs to know what an emulated processor lacks. On Arm,
    the features are named: a cross compiler knows no ``native``.

    Raises:
        DriverUnavailable: the processor does not have the set.
    """
    if highest is not None and (architecture() != "x86_64" or not has(highest)):
        needed, flags = features_of("x86_64", highest), processor_flags()
        raise DriverUnavailable(
            f"the cpu driver's option instructions is {highest}, but this processor, {platform.machine()}, has no "
            f"{' or '.join(each for each in needed if each not in flags)}",
            "omit the option, or choose a lower instruction set",
        )
    if architecture() == "aarch64":
        return (_of_arm(processor_flags()),)
    unusable = sorted(each for each in unusable_flags() if each.startswith(("avx", "amx")))
    return ("-march=native", *("-mno-" + _flag(each) for each in unusable), *(_FLAGS[highest] if highest else ()))


def portable_flags(of: str, name: str) -> tuple[str, ...]:
    """Return the compiler's flags for every processor of an architecture that has a set, whatever this one is."""
    features = features_of(of, name)
    return (_of_arm(features),) if of == "aarch64" else ("-march=x86-64", *("-m" + _flag(each) for each in features))


def _flag(feature: str) -> str:
    return feature.replace("amx_", "amx-").replace("sse4_", "sse4.").replace("_", "")


def _of_arm(features: Sequence[str] | frozenset[str]) -> str:
    found = [name for name in _HWCAPS if name in features]
    return "+".join(("-march=armv8.2-a" if "dotprod" in found else "-march=armv8-a", *found))
