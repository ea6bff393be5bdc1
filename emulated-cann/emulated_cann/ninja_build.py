"""Incremental build of the emulated CANN's libraries in a folder, with ninja.

The folder holds copies of the sources, which are written only if their text changes. So checkouts with the same sources
share their objects. Symbolic links in the folder point to torch and torch_npu, so environments with the same releases
share objects too. The libraries contain the path of the torch that they are linked with.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from . import symbols
from .errors import EmulationError, Unavailable

if TYPE_CHECKING:
    from ninja.ninja_syntax import Writer

PRECOMPILED = "ops/op.h"
"""The header through which every operation includes ATen's headers, which take nearly all the compile time."""
UNIT_BYTES = 40_000
"""The size of the sources that are compiled together. Most of a small source's compile time goes into headers."""
FEW = 5
"""Builds of at most this many commands take seconds, and print no message."""
SHOWN_LINES = 30
OWN_HEADERS = (
    "-iquote.",
    "-Isrc",
    "-Isrc/ops",
    *(f"-isystem torch_npu/include{each}" for each in ("/third_party/acl/inc", "/third_party/hccl/inc", "")),
)
TORCH_HEADERS = "-isystem torch/include"  # -isystem excludes them from ninja's dependencies


@attrs.frozen
class Library:
    """One of CANN's libraries as torch_npu loads it, by SONAME.

    Attributes:
        name: the file is lib<name>.so.
        folder: the folder of its sources; None for an empty library, whose functions are in those that it needs.
        needs: libraries to link with, which are built first.
        torch: whether it uses ATen.
    """

    name: str
    folder: str | None = None
    needs: tuple[str, ...] = ("ascendcl",)
    torch: bool = False


@attrs.frozen
class Recipe:
    """The inputs of a build.

    Attributes:
        sources: the text of each source, by its path relative to ``folder``.
        folder: the folder of the sources, for messages.
        libraries: the libraries, each after those that it needs.
        compiler: the path of the compiler, and its arguments.
        flags: compiler flags.
        torch: the folder of the package torch.
        torch_npu: the folder of the package torch_npu.
    """

    sources: Mapping[str, bytes]
    folder: Path
    libraries: Sequence[Library]
    compiler: Sequence[str]
    flags: Sequence[str]
    torch: Path
    torch_npu: Path

    def units(self, library: Library) -> dict[str, str]:
        """Return the text of a library's translation units, which include some sources each, by the first's path."""
        names = sorted(each for each in self.sources if each.startswith(f"{library.folder}/") and each.endswith(".cpp"))
        found: dict[str, str] = {}
        unit, size = "", UNIT_BYTES
        for each in names:
            if size >= UNIT_BYTES:
                unit, size = each.removesuffix(".cpp"), 0
            found[unit] = found.get(unit, "") + f'#include "src/{each}"\n'
            size += len(self.sources[each])
        return found


def ninja_program() -> str:
    """Return the path of the binary in the Python package ninja.

    Raises:
        Unavailable: the package is not installed, or has no binary.
    """
    remedy = "pip install ninja"
    try:
        import ninja

        # BIN_DIR is wrong in a virtual environment that uses the packages of another.
        files = importlib.metadata.files("ninja") or ()
    except ImportError as error:  # PackageNotFoundError too
        raise Unavailable(
            f"the emulated CANN is built with the Python package ninja, which is not installed ({error})", remedy
        ) from None
    found = [Path(ninja.BIN_DIR) / "ninja", *(Path(str(each.locate())) for each in files if each.name == "ninja")]
    for each in found:
        if each.is_file() and os.access(each, os.X_OK):
            return str(each.resolve())
    looked = ", ".join(map(str, found))
    raise Unavailable(f"the Python package ninja has no executable: looked for {looked}", remedy)


def build_libraries(recipe: Recipe, folder: Path) -> Path:
    """Update the libraries in a build's folder, and return their folder.

    Raises:
        Unavailable: ninja or nm is missing.
        EmulationError: a source does not compile, or a library does not link; the error contains the compiler's output.
    """
    ninja = ninja_program()
    _copy_changed(recipe.sources, folder / "src")
    for name, package in (("torch", recipe.torch), ("torch_npu", recipe.torch_npu)):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(package)
    _write_changed(folder / "pch" / "op.h", f'#include "{PRECOMPILED}"\n'.encode())
    for library in recipe.libraries:
        for name, text in recipe.units(library).items():
            _write_changed(folder / f"unit/{name}.cpp", text.encode())
    _write_build_file(recipe, folder / "build.ninja")
    todo = _run(ninja, recipe, folder, "-n", "objects").count("\n[")
    if todo > FEW:
        sys.stderr.write("emulated-cann: building the emulated CANN, once; this takes minutes\n")
    _run(ninja, recipe, folder, "--quiet", "objects")
    objects = [folder / f"obj/{each}.o" for library in recipe.libraries for each in recipe.units(library)]
    stubs = symbols.refusing_stubs(recipe.torch_npu, symbols.defined(*objects))
    for library in recipe.libraries:
        if library.folder is not None:
            _write_changed(folder / "stubs" / f"{library.name}.cpp", stubs.get(library.name, "").encode())
    _run(ninja, recipe, folder, "--quiet", "libraries")
    return folder / "lib64"


def _write_build_file(recipe: Recipe, path: Path) -> None:
    from ninja.ninja_syntax import Writer, escape

    compiler, flags = (escape(shlex.join(each)) for each in (recipe.compiler, recipe.flags))
    common = f"{compiler} {flags} {' '.join(OWN_HEADERS)}"
    with path.open("w", encoding="utf-8") as file:
        writer = Writer(file)  # type: ignore[arg-type]  # ninja's annotation says str
        depends = "-MMD -MF $out.d"
        writer.rule("compile", f"{common} $more {depends} -c $in -o $out", depfile="$out.d", deps="gcc")
        header = f"{common} {TORCH_HEADERS} {depends} -x c++-header $in -o $out"
        writer.rule("precompile", header, depfile="$out.d", deps="gcc")
        writer.rule("link", f"{compiler} -shared -pthread $flags -o $out $in -Llib64 $libraries")
        writer.build(["pch/op.h.gch"], "precompile", ["pch/op.h"])
        objects = []
        for library in recipe.libraries:
            more = f"{TORCH_HEADERS} -include pch/op.h" if library.torch else ""
            for unit in recipe.units(library):
                first = ["pch/op.h.gch"] if library.torch else []
                objects.append(f"obj/{unit}.o")
                writer.build(objects[-1:], "compile", [f"unit/{unit}.cpp"], implicit=first, variables={"more": more})
        writer.build(["objects"], "phony", objects)
        libraries = [_write_library(writer, recipe, library) for library in recipe.libraries]
        writer.build(["libraries"], "phony", libraries)


def _write_library(writer: Writer, recipe: Recipe, library: Library) -> str:
    from ninja.ninja_syntax import escape

    made = f"lib64/lib{library.name}.so"
    parts = [f"obj/{each}.o" for each in recipe.units(library)]
    if library.folder is not None:
        parts.append(f"stubs/{library.name}.o")
        writer.build(parts[-1:], "compile", [f"stubs/{library.name}.cpp"])
    flags = f"-Wl,-soname,lib{library.name}.so,-rpath,$ORIGIN,--no-undefined,--no-as-needed"
    libraries = [f"-l{each}" for each in library.needs]
    if library.torch:
        libraries += ["-Ltorch/lib", f"-Wl,-rpath,{recipe.torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    variables = {"flags": escape(shlex.quote(flags)), "libraries": escape(shlex.join(libraries))}
    writer.build([made], "link", parts, [f"lib64/lib{each}.so" for each in library.needs], variables=variables)
    return made


def _run(ninja: str, recipe: Recipe, folder: Path, *arguments: str) -> str:
    """Run ninja, and return its output."""
    command = [ninja, "-C", str(folder), "-j", str(len(os.sched_getaffinity(0))), *arguments]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode != 0:
        failed = next((line.split()[-1] for line in result.stdout.splitlines() if line.startswith("FAILED: ")), "ninja")
        lines = [re.sub(r"(\./)?\bsrc/", f"{recipe.folder}/", line) for line in _compiler_output(result.stdout)]
        more = [f"... and {len(lines) - SHOWN_LINES} more lines"] if len(lines) > SHOWN_LINES else []
        raise EmulationError(
            "\n".join([f"the emulated CANN does not build: {failed} failed", *lines[:SHOWN_LINES], *more]),
            f"correct the sources in {recipe.folder} if you changed them; otherwise install g++ 11 or later, or report "
            "it",
        )
    return f"\n{result.stdout}"


def _compiler_output(output: str) -> Iterator[str]:
    """Yield the lines of the compiler, without ninja's failed targets, commands and messages."""
    is_command = False
    for line in output.splitlines():
        is_failure = line.startswith("FAILED: ")
        if not (is_command or is_failure or line.startswith(("ninja: Entering", "ninja: build stopped"))):
            yield line
        is_command = is_failure


def _copy_changed(files: Mapping[str, bytes], folder: Path) -> None:
    """Make a folder contain exactly these files. An unchanged file keeps its modification time."""
    for each in folder.rglob("*"):
        if each.is_file() and str(each.relative_to(folder)) not in files:
            each.unlink()
    for name, data in files.items():
        _write_changed(folder / name, data)


def _write_changed(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_bytes() != data:
        path.write_bytes(data)
