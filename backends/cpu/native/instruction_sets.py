"""Instruction sets of x86 that the C++ kernels can be limited to."""

from __future__ import annotations

import platform
from typing import Literal

from hal.errors import DriverUnavailable

from .processor import processor_flags, unusable_flags

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
