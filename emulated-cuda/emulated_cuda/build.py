"""Compiles the emulator with g++, once for each version of its sources and of torch.

The libraries are an entry of hal's compile cache, so they never change under a process that has loaded them. Of two
processes that build at once, one waits.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs

from .libraries import DRIVER, OPERATIONS, RUNTIME

SOURCES = Path(__file__).parent / "src"
TORCH, CUDA = "2.11", "13."
"""The supported versions: the CUDA functions that torch calls differ between releases."""
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-Wall", "-pthread")
LINKED = ("torch", "torch_cpu", "torch_cuda", "c10", "c10_cuda")
SHOWN_LINES = 30


class CannotEmulate(Exception):
    """A prerequisite is missing on this machine. The message names it and the remedy."""


@attrs.frozen
class Tools:
    """The tools and folders that the build uses.

    Attributes:
        compiler: the path of g++.
        packages: the folder that torch and NVIDIA's packages are installed in.
        torch: torch's version.
    """

    compiler: str
    packages: Path
    torch: str

    @classmethod
    def find(cls) -> Tools:
        """Locate the tools.

        Raises:
            CannotEmulate: one is missing, or the build of torch is not supported.
        """
        spec = importlib.util.find_spec("torch")
        if sys.platform != "linux":
            raise CannotEmulate(f"the emulated CUDA needs Linux, and this is {sys.platform}")
        if spec is None or not spec.origin:
            raise CannotEmulate(f"torch is not installed: pip install torch=={TORCH}.0")
        from hal.drivers.torch_build import installed_torch  # importing hal imports torch

        version = importlib.metadata.version("torch")
        build = installed_torch()
        cuda = build.platforms.get("cuda", "") if build else ""
        if not version.startswith(f"{TORCH}.") or not cuda.startswith(CUDA):
            found = f"the installed torch {version} is {f'built for CUDA {cuda}' if cuda else 'no build for CUDA'}"
            raise CannotEmulate(
                f"the emulated CUDA supports torch {TORCH} for CUDA {CUDA}x: {found}. In a separate environment: "
                f"pip install torch=={TORCH}.0, which is that build on Linux; `make test-cuda-emulated` does it"
            )
        compiler = shutil.which("g++")
        if compiler is None:
            raise CannotEmulate(
                "the emulated CUDA is compiled on first use, and there is no g++ on the PATH: "
                "install g++ 11 or later (Debian and Ubuntu: apt install g++)"
            )
        tools = cls(compiler, Path(spec.origin).parent.parent, version)
        for header in (tools.packages / "nvidia/cu13/include/cuda_runtime_api.h", tools.triton / "crt/host_defines.h"):
            if not header.exists():
                raise CannotEmulate(f"there is no {header}, which comes with torch from PyPI: install torch anew")
        return tools

    @property
    def triton(self) -> Path:
        """Return the headers that NVIDIA ships with the compiler's package rather than the runtime's."""
        return self.packages / "triton/backends/nvidia/include"

    def includes(self) -> list[str]:
        """Return the include folders."""
        torch = self.packages / "torch/include"
        others = (torch, torch / "torch/csrc/api/include", self.packages / "nvidia/cu13/include")
        return [f"-I{SOURCES}", *(f"-isystem{each}" for each in others), f"-idirafter{self.triton}"]


def build() -> Path:
    """Build the libraries if they are not in the cache, and return their folder.

    Raises:
        CannotEmulate: a prerequisite is missing, or a source does not compile; the message has the compiler's errors.
        ConfigError: another user may write in the cache.
    """
    tools = Tools.find()
    from hal.config import CompileCache, cache_folder, compiler_key, content_key

    texts = (
        part for path in (Path(__file__), *sorted(SOURCES.rglob("*.*"))) for part in (path.name, path.read_bytes())
    )
    key = content_key(tools.torch, str(tools.packages), compiler_key(Path(tools.compiler)), *FLAGS, *texts)
    return CompileCache(cache_folder("emulated-cuda")).get_or_put(key, lambda folder: _build(tools, folder))


def _build(tools: Tools, folder: Path) -> None:
    sys.stderr.write("building the emulated CUDA, about a minute, once\n")
    sources = sorted(SOURCES.rglob("*.cpp"), key=lambda path: path.parent.name != "operations")  # slowest first
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        compiled = list(pool.map(lambda path: _compile(tools, path, folder), sources))
    objects = {
        part: [made for path, made in zip(sources, compiled, strict=True) if path.parent.name == part]
        for part in ("runtime", "driver", "operations")
    }
    versions = f"--version-script={SOURCES / 'runtime' / 'symbols.map'}"
    _link(tools, folder / RUNTIME, objects["runtime"], f"-Wl,{versions},--no-undefined", "-ldl")
    _link(tools, folder / DRIVER, objects["driver"], f"-L{folder}", f"-l:{RUNTIME}", "-Wl,--no-undefined")
    libraries = [f"-L{tools.packages / 'torch/lib'}", *(f"-l{each}" for each in LINKED)]
    # Torch's libraries depend on others at a path that only the loader needs to know.
    _link(
        tools,
        folder / OPERATIONS,
        objects["operations"],
        *libraries,
        f"-L{folder}",
        f"-l:{RUNTIME}",
        "-Wl,--allow-shlib-undefined",
    )
    for each in compiled:
        each.unlink()
    _stand_in_for_nvcc(folder)


def _compile(tools: Tools, source: Path, folder: Path) -> Path:
    made = folder / f"{source.parent.name}-{source.stem}.o"
    _run(source.name, [tools.compiler, *FLAGS, *tools.includes(), "-c", str(source), "-o", str(made)])
    return made


def _link(tools: Tools, library: Path, objects: list[Path], *arguments: str) -> None:
    command = [tools.compiler, "-shared", "-pthread", f"-Wl,-soname,{library.name}", *map(str, objects), *arguments]
    _run(library.name, [*command, "-o", str(library)])


def _run(what: str, command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        said = "\n".join(result.stderr.splitlines()[:SHOWN_LINES])
        raise CannotEmulate(f"the emulated CUDA does not build: {what}: g++ exited with {result.returncode}\n{said}")


def _stand_in_for_nvcc(folder: Path) -> None:
    """Provide an empty nvcc: the driver uses FlashInfer only where it finds nvcc, but nothing is compiled here."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'the emulated CUDA compiles nothing' >&2\nexit 1\n", encoding="utf-8")
    nvcc.chmod(0o755)
