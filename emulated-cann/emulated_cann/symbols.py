"""Stubs for the functions of CANN that the installed torch_npu calls but that are not emulated.

A stub sets an error message with its name and returns an error code. So a missing function causes an error, never a
wrong number.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from .errors import EmulationError, Unavailable

LINKED = re.compile(r"acl[A-Za-z]|rt[A-Z]|Msprof[A-Z]|Hccl[A-Z]|_ZNK?(3atb|2ge)")
LOOKED_UP = re.compile(rb"\0((?:acl(?:nn|rt|mdl|op|prof|sys|dump|sk|[A-Z])|Hccl[A-Z])\w+)(?=\0)")
ATB, GE = re.compile(r"_ZNK?3atb"), re.compile(r"_ZNK?2ge")
"""Mangled names of C++ functions. GE is the graph engine, whose functions return objects and not error codes."""
PHASES = ("GetMaxWorkspaceSize", "GetWorkspaceSize", "")

ABSENT = frozenset[str]()
"""Names that torch_npu looks up but does not require, and that get no stub. None so far."""

WEAK, UNDEFINED = frozenset("vVwW"), frozenset("Uvw")
"""Symbol types of nm. Lower-case letters of weak symbols are undefined ones."""


def linked(torch_npu: Path) -> set[str]:
    """Return the functions of CANN that the wheel's libraries link with, and need in order to load."""
    undefined, known = set[str](), set[str]()
    for path in libraries(torch_npu):
        for name, weak, is_defined in read_symbols(path):
            if is_defined:
                known.add(name)
            elif not weak and LINKED.match(name):
                undefined.add(name)
    return undefined - known


def looked_up(torch_npu: Path) -> set[str]:
    """Return the functions of CANN that the wheel looks up by name, if it contains their names as whole strings."""
    names = set[str]()
    for path in libraries(torch_npu):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            names.update(found[1].decode() for found in LOOKED_UP.finditer(data))
    return names


def defined(*paths: Path) -> set[str]:
    """Return the symbols that objects or libraries define."""
    return {name for path in paths for name, _, is_defined in read_symbols(path) if is_defined}


def libraries(torch_npu: Path) -> list[Path]:
    """Return the wheel's libraries that call CANN."""
    return sorted(path for each in ("lib", "dynamo/torchair/core", "") for path in (torch_npu / each).glob("*.so"))


def read_symbols(path: Path) -> Iterator[tuple[str, bool, bool]]:
    """Yield the global symbols of an object, or the exported symbols of a library: name, is weak, is defined.

    Raises:
        Unavailable: nm is not on the PATH.
        EmulationError: nm cannot read the file.
    """
    program = shutil.which("nm")
    if program is None:
        raise Unavailable(
            "the build of the emulated CANN requires nm, but there is no nm on the PATH",
            "install binutils (Debian and Ubuntu: apt install binutils)",
        )
    scope = "--extern-only" if path.suffix == ".o" else "--dynamic"
    command = [program, scope, "--format=posix", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}, check=False)
    if result.returncode != 0:
        raise EmulationError(
            f"nm cannot read the symbols of {path}: {result.stderr.strip()}",
            "install torch_npu and the emulated CANN for this machine's processor, or a newer binutils",
        )
    for line in result.stdout.splitlines():
        versioned, kind = line.split()[:2]
        yield versioned.partition("@")[0], kind in WEAK, kind not in UNDEFINED


def refusing_stubs(torch_npu: Path, emulated: set[str]) -> dict[str, str]:
    """Return C++ code by library, with a stub for each function that torch_npu calls and that is not ``emulated``."""
    names = linked(torch_npu) | looked_up(torch_npu)
    wanted = set[str]()
    for name in names - ABSENT:
        if name.startswith("aclnn"):
            kernel = _kernel(name)
            wanted |= {kernel, f"{kernel}GetWorkspaceSize", name}
        else:
            wanted.add(name)
    by_library: dict[str, list[str]] = {"ascendcl": [], "opapi": [], "atb": []}
    for name in sorted(wanted - emulated):
        home = "opapi" if name.startswith("aclnn") else "atb" if ATB.match(name) else "ascendcl"
        by_library[home].append(name)
    pointers = returning_pointers(torch_npu)
    return {library: _text(stubs, pointers) for library, stubs in by_library.items()}


def returning_pointers(torch_npu: Path) -> set[str]:
    """Return the functions that return a pointer, by CANN's headers. Their stubs return null, not an error code."""
    found = set[str]()
    for path in (torch_npu / "include" / "third_party").rglob("*.h"):
        text = path.read_text(encoding="utf-8", errors="replace")
        found.update(re.findall(r"^[^\n(]*\*\s*(acl\w+)\s*\(", text, re.MULTILINE))
    return found


def _kernel(name: str) -> str:
    for phase in PHASES:
        if name.endswith(phase):
            return name.removesuffix(phase)
    return name


HEAD = """// Functions of CANN that are not emulated. Generated.
#include <cxxabi.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

// Declared here, because its headers also declare the functions below, with their actual types.
namespace emulator {
int fail(int code, const std::string& reason);
}

// ACL_ERROR_API_NOT_SUPPORT, and aclnn's code for an operator whose kernels are not installed.
static std::string readable(const char* name) {
    int status = 0;
    char* plain = abi::__cxa_demangle(name, nullptr, nullptr, &status);
    std::string text = plain ? plain : name;
    std::free(plain);
    return text;
}
static long refuse(const char* name, int code) {
    emulator::fail(code, "the emulated CANN has no " + readable(name));
    return code;
}
[[noreturn]] static void no_graph_engine(const char* name) {
    throw std::runtime_error("the emulated CANN has no graph engine (GE), and " + readable(name) +
                             " was called; compile with the mode reduce-overhead of torchair's CompilerConfig, or "
                             "with the backend npugraph_ex");
}

extern "C" {
"""


def _text(names: Iterable[str], pointers: set[str]) -> str:
    lines = []
    for name in names:
        if name in pointers:
            lines.append(f'void* {name}() {{ refuse("{name}", 200001); return nullptr; }}')
        elif GE.match(name):
            destroys = name.endswith(("D0Ev", "D1Ev", "D2Ev"))  # must not throw
            lines.append(f"void {name}() {{" + ("}" if destroys else f' no_graph_engine("{name}"); }}'))
        elif name.startswith("aclnn"):
            lines.append(f'long {name}() {{ return refuse("{_kernel(name)}", 561112); }}')
        else:
            lines.append(f'long {name}() {{ return refuse("{name}", 200001); }}')
    return HEAD + "\n".join(lines) + "\n}\n"
